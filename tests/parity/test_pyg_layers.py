"""Every convolution of PyTorch Geometric on workers: outputs and all gradients equal one machine's."""

import functools

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import sar
from sar.adapters.pyg import refused
from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.errors import GraphError
from tests.graphs import EdgeList, partition_in_memory, random_graph
from tests.matrix import corner
from tests.parity.harness import assert_close, check, deal, gradients, parameter_gradients, random_data, run_everywhere
from tests.parity.pyg_layers import ELSEWHERE, LAYERS, NEED_OTHERS, REFUSED, edges_of, gps, layer_results, random_parts
from tests.parity.scenarios import SCENARIOS, scattered
from tests.parity.test_pyg_readout import with_special_values

NAMES = list(LAYERS)
GROUPS = [NAMES[first : first + 10] for first in range(0, len(NAMES), 10)]
"""Groups run in one trip to the workers, which is what takes time."""

TOO_FEW = (
    *("SimpleConv median", "SAGEConv lstm", "ChebConv greatest", "CGConv batch", "EdgeConv batch", "GENConv"),
    *("models.GIN", "GPSConv performer batch", "SimpleConv normalising"),
)
"""Layers that fail or give NaN on graphs with one node or no edges, on one machine too."""


def run(pool, world_size, names, modes, settings=None):
    parts = random_parts(world_size)
    cases = [(layer_results, (name,)) for name in names]
    check(pool, parts, random_data(parts, torch.float64), cases, modes, settings, timeout=250)


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]} to {names[-1]}")
@pytest.mark.parametrize("world_size, modes", [(2, (1,)), corner(2, (2, 3)), corner(3, (1, 2, 3))])
def test_layers(pool, world_size, modes, names):
    run(pool, world_size, names, modes)


@pytest.mark.parametrize("world_size", [2])
def test_in_many_tiles(pool, world_size):
    names = ["SimpleConv max", "SimpleConv mul", "GCNConv weighted", "GATConv", "NNConv", "EdgeConv", "TransformerConv"]
    run(pool, world_size, names, (1, 2), {"comm_buffer_bytes": 1000, "pipeline_depth": 2})


@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_attention_to_features_of_any_size(pool, world_size):
    """As of DGL's layers, in many tiles."""
    parts = partition_in_memory(random_graph(1, 30, 4000), scattered(30, world_size), world_size)
    names = ("GATConv", "GATv2Conv", "TransformerConv")
    by_exponentials = ("GATConv edges", "TransformerConv edges", "GATConv slope below 0")
    cases = [(layer_results, (name,)) for name in names + by_exponentials]
    for size, dtype, tolerance in (30, torch.float32, 1e-2), (100, torch.float32, 1e-1), (10_000, torch.float64, 1e-5):
        data, exact = (random_data(parts, each) for each in (dtype, torch.float64))
        data.nodes["x"] *= size
        exact.nodes["x"] = data.nodes["x"].double()
        settings = {"comm_buffer_bytes": 10_000}
        check(pool, parts, data, cases, (1,), settings, 60, exact, tolerance, least_scale=size)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["first worker without nodes", "star", "isolated", "no edges", "one node"])
@pytest.mark.parametrize("world_size", [3])
def test_odd_graphs(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    left_out = {"star": ("SimpleConv median",), "no edges": TOO_FEW, "one node": TOO_FEW}.get(scenario, ())
    cases = [(layer_results, (name,)) for name in NAMES if not name.startswith(left_out)]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,), timeout=250)


def as_many_nodes_as_found(graph, data):
    """Functions that are not told how many nodes there are."""
    torch.manual_seed(3)
    layer, x, edges = pyg.EGConv(6, 4, ["mean"], num_heads=2).double(), data.leaf("x"), edges_of(graph)
    degrees = {"node degrees": utils.degree(edges[0]), "node looped": utils.degree(utils.add_self_loops(edges)[0][0])}
    return degrees | gradients(layer(x, edges), data, layer, x=x)


@pytest.mark.parametrize("world_size", [3])
def test_workers_whose_nodes_have_no_in_edges(pool, world_size):
    """Worker 2 has none at all, and worker 1 none into its first nodes: what needs some has those of others."""
    src, ends = torch.arange(90) % 30, torch.cat([torch.arange(10), torch.arange(15, 20)])
    parts = partition_in_memory(EdgeList(src, ends[torch.arange(90) * 7 % 15], 30), torch.arange(30) // 10, world_size)
    cases = [(layer_results, (name,)) for name in ("SAGEConv lstm", "FeaStConv", "SimpleConv median")]
    check(pool, parts, random_data(parts, torch.float64), [*cases, (as_many_nodes_as_found, ())], (1,))


def doubled(function):
    """A function that does more, and looks as the one in whose place it is."""
    return functools.wraps(function)(lambda *args, **kwargs: 2 * function(*args, **kwargs))


def normalised_edges(layer):
    layer.add_self_loops, layer.lin_edge = False, nn.Sequential(layer.lin_edge, nn.BatchNorm1d(8)).double()


CHANGES = {
    "backward hook": lambda layer: layer.aggr_module.register_full_backward_hook(lambda _, into, out: (2 * into[0],)),
    "global hook": lambda layer: register_module_forward_hook(
        lambda module, given, made: 2 * made if module is layer.aggr_module else None
    ),
    "replaced forward": lambda layer: setattr(layer.aggr_module, "forward", doubled(layer.aggr_module.forward)),
    "replaced message": lambda layer: setattr(layer, "message", doubled(layer.message)),
    "dropout of all": lambda layer: setattr(layer, "dropout", 1.0),
    "edges normalised": normalised_edges,
    "messages centred": lambda layer: layer.nn.register_forward_hook(lambda *given: given[2] - given[2].mean(0)),
}


def with_change(graph, data, name, how):
    handles = []
    results = layer_results(graph, data, name, lambda layer: handles.append(CHANGES[how](layer)))
    if how == "global hook":
        handles[0].remove()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_whose_modules_or_functions_have_changed(pool, world_size):
    """They are called, with all edges where more than one may matter; nothing is computed in their place."""
    parts = random_parts(world_size)
    cases = [
        *[("SimpleConv mean", how) for how in [*CHANGES][:4]],
        *[(name, how) for name in ("GATConv", "GATv2Conv") for how in ("replaced message", "dropout of all")],
    ]
    if world_size == 1:  # this hook looks at all edges
        cases.append(("EdgeConv", "messages centred"))
    settings = {"comm_buffer_bytes": 1000}
    check(pool, parts, random_data(parts, torch.float64), [(with_change, case) for case in cases], (1,), settings)
    parts = random_parts(world_size, even=True)  # a GATConv without edges returns before it normalises them
    case = with_change, ("GATConv edges", "edges normalised")
    check(pool, parts, random_data(parts, torch.float64), [case], (1,), settings)


def ties(graph, data, reducer):
    """Messages that are equal share a gradient as on one machine: zeros of ReLU, and products with zeros."""
    x = data.leaf("x")
    h = data.leaf("y")
    pyg.SimpleConv(reducer)(h.relu(), edges_of(graph)).mul(data.nodes["cotangent"][:, :6]).sum().backward()
    out = pyg.SimpleConv(reducer)((x.relu() * 2).round(), edges_of(graph)) + x
    return {**gradients(out, data, x=x), "node y.grad": h.grad}


@pytest.mark.parametrize("world_size", [2])
def test_ties_and_zeros(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(ties, (how,)) for how in ("max", "min", "mul")])


def special_messages(graph, data, reducer):
    x = data.leaf("special")
    return gradients(pyg.SimpleConv(reducer)(x, edges_of(graph)), data, x=x)


def special_softmax(graph, data, end):
    """By sources and destinations; and the maximum at sources that it subtracts, of which some have no edges."""
    edges, values = edges_of(graph), data.edges["scores"]
    count = graph.num_nodes()
    return {
        "edge softmax": utils.softmax(values, edges[end], num_nodes=count),
        "node max": utils.scatter(values, edges[end], 0, count, "max"),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_infinite_and_undefined_values(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts, torch.float64)
    data.nodes["special"], data.edges["scores"] = (with_special_values(x) for x in (data.nodes["x"], data.edges["e"]))
    cases = [(special_messages, (reducer,)) for reducer in ("max", "min", "sum")]
    check(pool, parts, data, cases + [(special_softmax, (end,)) for end in (0, 1)], (1, 2), {"comm_buffer_bytes": 1000})


def functions(graph, data):
    """Functions on an edge index: degrees, self-loops, normalisation, softmax and sums at either end."""
    edges, weight = edges_of(graph), data.leaf("w")
    count, values = graph.num_nodes(), data.edges["e"]
    looped, looped_weight = utils.add_self_loops(*utils.remove_self_loops(edges, weight.squeeze(1)), 0.5, count)
    _, norm = gcn_norm(edges, weight.squeeze(1), count)
    _, laplacian = utils.get_laplacian(looped, looped_weight, "rw", num_nodes=count)
    made = {
        "node out-degree": utils.degree(edges[0], count),
        "node in-degree": utils.degree(looped[1], count),
        "node sum": utils.scatter(values, edges[0], 0, count, "sum"),
        "node mean": utils.scatter(values, edges[0], 0, count, "mean"),
        "edge softmax": utils.softmax(values, edges[1], num_nodes=count),
        "edge softmax of sources": utils.softmax(values, edges[0], num_nodes=count),
        "edge labels": (data.nodes["y"][:, 0] > 0).long()[edges[0]].double(),
        "node loops": utils.scatter(looped_weight, looped[1], 0, count, "sum"),
        "node norm": utils.scatter(norm, gcn_norm(edges, None, count)[0][1], 0, count, "sum"),
        "sum laplacian": laplacian.square().sum(),
    }
    if isinstance(edges, DistributedEdgeIndex):  # as the error for this flow says
        made["node against"] = pyg.SimpleConv("mean")(data.nodes["x"], edges.reversed)
    else:
        made["node against"] = pyg.SimpleConv("mean", flow="target_to_source")(data.nodes["x"], edges)
    (made["node norm"] * data.nodes["cotangent"][:, 0]).sum().add(made["sum laplacian"]).backward()
    return {**made, "edge w.grad": weight.grad}


@pytest.mark.parametrize("world_size", [2, corner(3)])
def test_functions(pool, world_size):
    parts = random_parts(world_size)
    check(pool, parts, random_data(parts, torch.float64), [(functions, ())])


def around_a_layer(graph, data, how):
    """What torch does around a module with all of its arguments."""
    torch.manual_seed(3)
    layer, x, edges = pyg.GATConv(6, 6).double(), data.leaf("x"), edges_of(graph)
    gradients_seen = []
    if how == "hooks":
        layer.register_full_backward_hook(lambda module, into, out: gradients_seen.append(out[0].sum()))
        out = layer(x, edges)
    elif how == "reversible":
        layer = pyg.GroupAddRev(pyg.SAGEConv(3, 3), num_groups=2).double()
        out = layer(x * 1, edges)
    else:
        out = checkpoint(layer, x, edges, use_reentrant=how == "reentrant")
    results = {**gradients(out, data, layer, x=x), "sum hooks": sum(gradients_seen, torch.zeros(()))}
    del results["node out"]  # which a reversible layer frees in the backward
    return results


@pytest.mark.parametrize("world_size", [2])
def test_around_a_layer(pool, world_size):
    parts = random_parts(world_size)
    cases = [(around_a_layer, (how,)) for how in ("hooks", "reversible", "reentrant", "not reentrant")]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))


FLOWS = {
    "GATConv": lambda: pyg.GATConv((6, 6), 4, heads=2),
    "SAGEConv": lambda: pyg.SAGEConv((6, 6), 4, aggr="max"),
    "EdgeConv": lambda: pyg.EdgeConv(nn.Linear(12, 4)),
}


def seeds_on_worker(mine, name):
    """A layer on a message flow graph of every second node, whose numbers are those of the first sources."""
    partition, data = mine
    seeds = torch.arange(*partition.node_ranges[sar.rank()])[::2]
    flow = sar.construct_mfgs(partition, seeds, 1)[0]
    torch.manual_seed(3)
    layer, x, edges = FLOWS[name]().double(), data.nodes["x"][flow.input_nodes], sar.pyg.edge_index(flow)
    out = layer((x, x[: len(seeds)]), edges)
    bare = sar.pyg.edge_index(sar.construct_mfgs(partition, seeds, 1, keep_seed_nodes=False)[0])
    if len(seeds) < 5:  # whose sources may all be seeds
        return out.detach()
    with pytest.raises(GraphError, match="of this worker's"):
        layer((x, x), edges)
    with pytest.raises(GraphError, match="are numbered separately"):
        utils.remove_self_loops(bare)
    return out.detach()


@pytest.mark.parametrize("world_size", [2])
def test_message_flow_graphs(pool, world_size):
    parts = random_parts(world_size)
    data = random_data(parts, torch.float64)
    edges, x = torch.stack(parts.reference().edges()), data.nodes["x"]
    seeds = torch.cat([torch.arange(*nodes)[::2] for nodes in parts.partitions[0].node_ranges])
    for name, make in FLOWS.items():
        torch.manual_seed(3)
        expected = make().double()((x, x), edges)[seeds].detach()
        assert_close(torch.cat(pool.run(seeds_on_worker, name, per_rank=deal(parts, data))), expected)


def refusal(graph, data, name):
    with pytest.raises(GraphError, match=f"{name} was called with a distributed edge_index or batch vector, but"):
        REFUSED[name].run(REFUSED[name].make().double(), data.leaf("x"), edges_of(graph), data)
    return {}


def other_operations(graph, data):
    """Operations that would need the numbers of all workers' nodes raise."""
    edges, x = edges_of(graph), data.nodes["x"]
    attending = gps(None).double()
    attending.attn = nn.MultiheadAttention(6, 2, batch_first=True).double()
    with pytest.raises(GraphError, match="attends between all pairs"):  # changed, it does more than sar's own
        attending(x, edges)
    own, loops = torch.arange(len(x)), torch.ones(2, 1, dtype=torch.int64)
    for operation in (
        lambda: edges + 1,
        lambda: edges[0] * 2,
        lambda: edges.flip(0),
        lambda: edges[0].sort(),
        lambda: edges[0] == 3,
        lambda: edges[0] == torch.zeros_like(edges[1]),
        lambda: edges[0][:5] == edges[1][:5],
        lambda: torch.cat([edges, loops], 1),
        lambda: torch.cat([edges[0], own]),
        lambda: utils.add_self_loops(edges, num_nodes=len(x) + 1),
        lambda: torch.stack([edges[1], edges[0]]),
        lambda: edges.to(torch.int32),
        lambda: edges.type(torch.int32),
        lambda: torch.tensor(edges),
        lambda: torch.sparse_coo_tensor(edges, torch.ones(edges.size(1))),
        lambda: edges[0][0],
        lambda: edges.max(1),
        lambda: x.clone().__setitem__(edges[0], 1.0),  # other workers' nodes among them
        lambda: pyg.SimpleConv()(x, torch.stack([edges[0], edges[1] + len(x)])),
    ):
        with pytest.raises(GraphError, match="distributed edge_index"):
            operation()
    changed = edges[:, edges[1] >= 0]
    changed[1].zero_()
    with pytest.raises(GraphError, match="Changing the destinations in place"):
        pyg.SimpleConv()(x, changed)
    for layer in (pyg.SimpleConv, pyg.GCNConv, pyg.GATConv):
        sizes = () if layer is pyg.SimpleConv else (6, 4)
        with pytest.raises(GraphError, match="flow='target_to_source'"):
            layer(*sizes, flow="target_to_source").double()(data.nodes["x"], edges)
    with pytest.raises(GraphError, match="expected a row for each of this worker's"):
        torch.cat([x, x]).__setitem__(edges[0], 1.0)
    return {}


def bad_message(x_j):
    raise ValueError("bad batch")


def one_worker_raises(mine, name, where):
    """A layer that runs on all edges at once, twice, as what one worker raises in it may come late to another."""
    graph = sar.construct_full_graph(mine)
    layer, x, edges = LAYERS[name].make(), torch.randn(graph.num_nodes(), 6), sar.pyg.edge_index(graph)
    if where == "message":
        layer.message = bad_message if sar.rank() == 1 else lambda x_j: x_j
    with graph.local_scope():
        if sar.rank() == 1 and where == "elsewhere":
            bad_message(x)
    for _ in range(2):
        layer(x, edges)


@pytest.mark.parametrize("name, where", [("SimpleConv std", "elsewhere"), ("EGConv", "message")])
@pytest.mark.parametrize("world_size", [2])
def test_what_another_worker_raises_is_told(pool, name, where):
    told, raised = pool.outcomes(one_worker_raises, name, where, per_rank=random_parts(2).partitions)
    assert (raised.kind, told.kind) == ("ValueError", "PeerError")
    assert "Worker 1 raised ValueError: bad batch" in told.message


def other_rows(graph, data):
    """Values with another number of rows than this worker has nodes are refused, on all workers."""
    edges, x = edges_of(graph), data.nodes["x"]
    linear = nn.Linear(12, 4).double()
    for call in (
        lambda rows: rows[edges[0]],
        lambda rows: (
            torch.zeros(len(rows), 6).double().scatter_add_(0, edges[0].view(-1, 1).expand(-1, 6), x[edges[1]])
        ),
        lambda rows: pyg.SimpleConv()(rows, edges),
        lambda rows: pyg.SimpleConv("max")((rows, x), edges),
        lambda rows: pyg.SimpleConv("median")((x, rows), edges),
        lambda rows: pyg.EdgeConv(linear)(rows, edges),
        lambda rows: pyg.GATConv(6, 4, add_self_loops=False).double()(rows, edges),
        lambda rows: pyg.SAGEConv((6, 6), 4).double()((x, x), edges, size=(len(rows), len(rows))),
        lambda rows: pyg.models.LINKX(len(rows), 6, 4, 4, 1).double()(rows, edges),
    ):
        for rows in (torch.cat([x, x]), x[:-1]):
            count = f"{len(rows)} rows on a distributed edge_index; expected a row for each of this worker's {len(x)} "
            with pytest.raises(GraphError, match=count):
                call(rows)
    return {}


@pytest.mark.parametrize("world_size", [2])
def test_what_is_refused(pool, world_size):
    parts = random_parts(world_size, even=True)
    cases = [(refusal, (name,)) for name in REFUSED] + [(other_operations, ()), (other_rows, ())]
    run_everywhere(pool, parts, random_data(parts, torch.float64), cases, (1,))


@pytest.mark.parametrize("name", NEED_OTHERS)
def test_layers_of_compiled_packages(name):
    """Once such a package is in the tests' environment, these layers belong to the others."""
    _, make = NEED_OTHERS[name]
    with pytest.raises(ImportError, match=r"requires '?`?(pyg-lib|torch-)"):
        make()


def test_every_convolution_is_here():
    known = {name.split(" ")[0] for name in NAMES} | REFUSED.keys() | NEED_OTHERS.keys() | set(ELSEWHERE)
    assert set(pyg.conv.__all__) - known == {"MessagePassing", "FusedGATConv"} | {
        name for name in pyg.conv.__all__ if name.startswith("CuGraph")
    }
    refused_layers = {kind.__name__ for kind, _ in refused.METHODS if kind in vars(pyg.conv).values()}
    assert refused_layers == set(REFUSED)


def scripted(mine):
    """Layers compiled by `torch.jit.script` on plain tensors, once a distributed edge index has been made."""
    sar.pyg.edge_index(sar.construct_full_graph(mine))
    x, edges = torch.randn(5, 6), torch.randint(5, (2, 20))
    for layer in (pyg.GCNConv(6, 4), pyg.SAGEConv(6, 4), pyg.GINConv(torch.nn.Linear(6, 4))):
        assert torch.equal(torch.jit.script(layer)(x, edges), layer(x, edges))


@pytest.mark.parametrize("world_size", [1])
def test_layers_can_still_be_scripted(pool, world_size):
    pool.run(scripted, per_rank=random_parts(world_size).partitions)


def trained(step, layer, x, edges):
    """The result, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    out = step(x, edges)
    layer.zero_grad()
    out.square().sum().backward()
    return {"out": out, "x": x.grad, **parameter_gradients(layer)}


def compiled(mine):
    graph = sar.construct_full_graph(mine)
    edges, x = sar.pyg.edge_index(graph), torch.randn(graph.num_nodes(), 6)
    torch.manual_seed(0)
    for layer in (pyg.SAGEConv(6, 4), pyg.GCNConv(6, 4), pyg.GATConv(6, 4), pyg.EdgeConv(torch.nn.Linear(12, 4))):
        torch._dynamo.reset()
        found = trained(torch.compile(layer, backend="eager"), layer, x, edges)
        torch.testing.assert_close(found, trained(layer, layer, x, edges), rtol=1e-4, atol=1e-4)


@pytest.mark.processes("torch.compile is refused among virtual workers")
@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize("world_size", [corner(1), corner(2)])
def test_layers_can_be_compiled(pool, world_size):
    pool.run(compiled, timeout=240, per_rank=random_parts(world_size).partitions)
