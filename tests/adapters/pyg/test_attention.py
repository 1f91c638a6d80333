"""What attention keeps for the backward, how it drops, and layers of users."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch.nn import functional
from torch_geometric.utils import degree, softmax

import sar
from tests.core.calls import calls_of
from tests.graphs import EdgeList, partition_in_memory, random_graph
from tests.parity.harness import build, check, deal, gradients, random_data, weighted_sum
from tests.parity.pyg_layers import IN, LAYERS, OUT, edges_of
from tests.parity.scenarios import SCENARIOS, scattered

KERNEL = ("GATConv", "GATConv pair", "GATv2Conv", "TransformerConv", "TransformerConv mean of heads")
KERNEL += ("TransformerConv no root", "TransformerConv pair")
BY_TILES = {
    "AGNNConv": 0,
    "GATConv edges": 6,
    "GATConv slope below 0": 0,
    "GATv2Conv edges": 6,
    "GeneralConv attention": 0,
    "HEATConv": 11,
    "PointTransformerConv": 0,
    "RGATConv additive-self-attention across-relation": 1,
    "SuperGATConv MX eval": 0,
    "TransformerConv edges": 0,
    "TransformerConv raw edges": 0,
}
"""Layers that make their scores in Python, and the columns of edge features that they make themselves."""


def call(graph, data, name):
    torch.manual_seed(3)
    layer = LAYERS[name].make().double().train("eval" not in name)
    return LAYERS[name].run(layer, data.leaf("x"), edges_of(graph), data)


def saved_of(mine, names):
    """Elements that autograd saves in the forward of each layer, apart from the features of edges that it is given."""
    graph, data, saved = build(mine[0], 1), mine[1], {}
    given = {data.edges["w"].data_ptr(), data.edges["e"].data_ptr()}

    def pack(tensor):
        if tensor.data_ptr() not in given:
            sizes[tensor.data_ptr(), tensor.shape] = tensor.numel()
        return tensor

    for name in names:
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call(graph, data, name)
        saved[name] = sum(sizes.values())
    return saved


def functions_passed(mine):
    """Functions of the adapter that a GATConv passes in its second forward."""
    graph, data = build(mine[0], 1), mine[1]
    layer, x, edges = pyg.GATConv(IN, OUT, heads=2).double(), data.nodes["x"], edges_of(graph)
    layer(x, edges)
    calls, _ = calls_of(lambda: layer(x, edges))
    return {name for file, name in calls if "/adapters/pyg/" in file and not name.endswith(">")}


@pytest.mark.processes("counts calls of this thread")
@pytest.mark.parametrize("world_size", [1])
def test_a_layer_passes_few_functions(pool):
    parts = several_times(1, 1)
    [functions] = pool.run(functions_passed, per_rank=deal(parts, random_data(parts, torch.float64)))
    assert len(functions) <= 12, functions


def several_times(times, workers=2):
    """The same graph with every edge so many times."""
    graph = random_graph(8, 30, 150)
    return partition_in_memory(
        EdgeList(graph.src.repeat(times), graph.dst.repeat(times), 30), scattered(30, workers), workers
    )


@pytest.mark.processes("counts storages, which virtual workers replace")
@pytest.mark.parametrize("world_size", [2])
def test_what_is_kept_does_not_grow_with_the_edges(pool, world_size):
    kept = []
    for times in (1, 4):
        parts = several_times(times)
        mine = deal(parts, random_data(parts, torch.float64))
        saved = pool.run(saved_of, [*KERNEL, *BY_TILES], per_rank=mine, timeout=60)
        kept.append((parts.edge_counts[0], saved[0]))
    (few, less), (many, more) = kept
    for name in more:
        assert more[name] - less[name] <= BY_TILES.get(name, 0) * (many - few), name


def dropped(graph, data, kind):
    """With equal scores, p = 0.5 and values of 1, each kept edge adds 2 / in-degree: dropped ones count in the sum.

    And the layer is linear in its values, so that <out, c> is <values, gradient> where the backward drops the same.
    """
    layer = {
        "kernel": lambda: pyg.TransformerConv(1, 1, bias=False, root_weight=False, dropout=0.5),
        "tiles": lambda: pyg.TransformerConv(1, 1, bias=False, root_weight=False, dropout=0.5, edge_dim=1),
    }[kind]().double()
    with torch.no_grad():
        for name, value in layer.named_parameters():
            value.fill_(1.0 if name == "lin_value.weight" else 0.0)
    edges = edges_of(graph)
    edge_attr = () if kind == "kernel" else (edges.new_zeros(edges.size(1), 1, dtype=torch.float64),)
    torch.manual_seed(5)
    kept = layer(torch.ones(graph.num_nodes(), 1, dtype=torch.float64), edges, *edge_attr).squeeze(1)
    kept = (kept * graph.in_degrees() / 2).detach()
    assert torch.allclose(kept, kept.round(), atol=1e-9)
    assert 0.3 < kept.sum() / edges.size(1) < 0.7
    x, cotangent = data.nodes["x"][:, :1].clone().requires_grad_(), data.nodes["cotangent"][:, :1]
    product = (layer(x, edges, *edge_attr) * cotangent).sum()
    product.backward()
    return {"sum along": (x * x.grad).sum() - product.detach()}


def dropped_on_worker(mine, kind):
    return dropped(build(mine[0], 1), mine[1], kind)["sum along"]


@pytest.mark.parametrize("kind", ["kernel", "tiles"])
@pytest.mark.parametrize("world_size", [2])
def test_dropped_weights_count_in_the_sum(pool, world_size, kind):
    parts = several_times(3, world_size)
    differences = pool.run(dropped_on_worker, kind, per_rank=deal(parts, random_data(parts, torch.float64)))
    assert abs(sum(differences)) < 1e-9


class Counting(pyg.MessagePassing):
    """Counts the edges that it is shown at a time."""

    def forward(self, x, edges):
        self.counts = []
        return self.propagate(edges, x=x)

    def message(self, x_j, x_i):
        self.counts.append(len(x_j))
        return (x_j - x_i).sin()


def counted(graph, data):
    layer, x, edges = Counting("mean"), data.leaf("x"), edges_of(graph)
    out = layer(x, edges)
    if dist.is_initialized():
        rows, edges_at_once = graph._relation(None).blocks, max(layer.counts)
        assert edges_at_once <= max(block.num_src + block.num_dst for block in rows) < max(b.num_edges for b in rows)
        nothing, checked = layer.counts.count(0), [count for count in layer.counts if count <= 4]
        assert sum(layer.counts) - sum(checked) <= edges.size(1) <= sum(layer.counts)
        assert nothing == 2  # to see what it needs, and to record it
        layer.counts.clear()
        layer(x, edges)
        assert sum(layer.counts) == edges.size(1)
    return gradients(out, data, x=x)


@pytest.mark.parametrize("world_size", [1, 2])
def test_messages_are_made_of_a_bounded_number_of_edges(pool, world_size):
    parts = several_times(4, world_size)
    check(pool, parts, random_data(parts, torch.float64), [(counted, ())], (1, 2), {"comm_buffer_bytes": 1000})


class Own(pyg.MessagePassing):
    """A user's layer. With `index`, its message is made of all edges into a worker's nodes at once."""

    def __init__(self, kind):
        super().__init__("sum", node_dim=0)
        self.kind = kind
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if kind == "scripted":
            self.norm = torch.jit.script(torch.nn.BatchNorm1d(IN).double())

    def forward(self, x, edges):
        weights = self.edge_updater(edges, x=x)
        return self.propagate(edges, x=x, weights=weights)

    def edge_update(self, x_j):
        return x_j[:, :1] / len(x_j) if self.kind == "edge_update" else x_j[:, :1]

    def message(self, x_j, x_i, weights):
        if self.kind == "scripted":
            return self.norm(x_j)
        if self.kind == "finite":
            assert x_j.isfinite().all()
        if self.kind == "counter":
            self.calls += 1
        return MESSAGES.get(self.kind, lambda x, index: x.sin())(x_j, x_i) * weights


class OwnWithIndex(Own):
    def message(self, x_j, index, edge_index, weights):
        assert len(x_j) == len(index) == edge_index.size(1)
        return MESSAGES.get(self.kind, lambda x, index: x.sin())(x_j, index) * weights


MESSAGES = {
    "softmax": softmax,  # with an index, as are degrees
    "degree": lambda x, index: x / degree(index)[index].unsqueeze(1),
    "noise": lambda x, index: x * torch.randint_like(x, 2, 3) + functional.dropout(x, 0.5, training=False),
}
OVER_ALL = {
    "mean": lambda x, index: x - x.mean(0),
    "positive mean": lambda x, index: x - x[x > 0].mean(),
    "count": lambda x, index: x / x.size(0),
    "places": lambda x, index: x * torch.arange(x.size(0)).unsqueeze(1),
    "first": lambda x, index: x - x[:1],
    "sums so far": lambda x, index: x.cumsum(0),
    "ranks": lambda x, index: x * x.argsort(0).argsort(0),
}
"""Messages that are of all edges, by their values, number or order."""
MESSAGES |= OVER_ALL


def of_ones_own(graph, data, kind, layer=Own):
    layer, x = layer(kind), data.leaf("x")
    out = layer(x, edges_of(graph))
    return {**gradients(out, data, x=x), "same calls": layer.calls.double()}


class Squared(pyg.TransformerConv):
    """A layer of a user's, with a message of its own."""

    def message(self, query_i, key_j, value_j, index, size_i):
        return value_j * softmax((query_i * key_j).sum(-1), index, num_nodes=size_i).square().unsqueeze(-1)


class Rectified(pyg.GATConv):
    def message(self, x_j, alpha):
        return x_j * alpha.unsqueeze(-1).square()


class WithoutLoops(pyg.MessagePassing):
    """Looks at the edge index, which has another shape on each worker."""

    def forward(self, x, edges):
        return self.propagate(edges, x=x, ends=edges)

    def message(self, x_j, ends):
        return x_j * (ends[0] != ends[1]).unsqueeze(1)


def own_layers(graph, data):
    """Layers that a user has written, changed, or watches, run as they are written."""
    found = {"node WithoutLoops": WithoutLoops()(data.nodes["x"], edges_of(graph))}
    for kind in (Squared, Rectified, pyg.GATConv):
        torch.manual_seed(3)
        layer = kind(IN, OUT, heads=2).double()
        if kind is pyg.GATConv:
            layer.register_edge_update_forward_hook(lambda layer, given, weights: weights.square())
        found[f"node {kind.__name__}"] = layer(data.nodes["x"], edges_of(graph))
    return found


def refused(mine, kind, layer):
    of_ones_own(build(mine[0], 1), mine[1], kind, layer)


def combined_by_the_user(graph, data):
    def message(x_j, **given):
        total, count = x_j.sum(0), torch.tensor(float(len(x_j)))
        return x_j - (sar.nn.global_sum(total) / sar.all_sum(count) if dist.is_initialized() else total / count)

    layer, x = Own("finite"), data.leaf("x")
    layer.message = message
    out = layer(x, edges_of(graph))
    return gradients(out, data, x=x)


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_of_users(pool, world_size):
    """Messages of one edge, of all edges into a node, and of all edges on one worker or several."""
    parts = several_times(4, world_size)
    data, settings = random_data(parts, torch.float64), {"comm_buffer_bytes": 1000}
    cases = [(of_ones_own, (kind,)) for kind in ("noise", "finite", "counter")] + [
        (combined_by_the_user, ()),
        (own_layers, ()),
    ]
    cases += [(of_ones_own, (kind, OwnWithIndex)) for kind in ("softmax", "degree", "noise")]
    if world_size == 1:
        cases += [(of_ones_own, ("scripted",)), *((of_ones_own, (kind, OwnWithIndex)) for kind in OVER_ALL)]
    check(pool, parts, data, cases, (1, 2), settings, visible_order=True)
    layers = [Own] if world_size == 1 else [OwnWithIndex]  # on one worker these are all edges
    wrong = [(kind, layer) for layer in layers for kind in OVER_ALL] + [("edge_update", Own)] * (world_size - 1)
    for kind, layer in wrong:
        outcomes = pool.outcomes(refused, kind, layer, per_rank=deal(parts, data))
        assert {outcome.kind for outcome in outcomes} <= {"GraphError", "PeerError", "CommunicationError"}
        advice = "let `message` take `index`" if world_size == 1 else "sar.nn.global_sum"
        assert any(f"{layer.__name__}." in outcome.message and advice in outcome.message for outcome in outcomes)


class Extreme(torch.nn.Module):
    """Scores that differ by hundreds, and -inf for some edges, where wanted for all of some nodes."""

    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, scores):
        return torch.where(scores > self.least, 300 * scores, -torch.inf)


def extreme_scores(graph, data):
    found = {}
    for least in (-torch.inf, 0.5):
        torch.manual_seed(3)
        layer, x = pyg.PointTransformerConv(IN, OUT, attn_nn=Extreme(least)).double(), data.leaf("x")
        out = layer(x, data.nodes["y"][:, :3], edges_of(graph))
        found[f"node out {least}"] = out
        if least < 0:
            weighted_sum(out, data.nodes["cotangent"]).backward()
            found["node x.grad"] = x.grad
    assert out.isnan().any()
    assert not out.isnan().all()
    return found


@pytest.mark.parametrize("world_size", [2])
def test_extreme_scores(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    settings = {"comm_buffer_bytes": 1000, "pipeline_depth": 2}
    check(pool, parts, random_data(parts, torch.float64), [(extreme_scores, ())], (1, 2), settings)
