"""Mini-batches on GPUs: sampled blocks with layers of DGL, as DGL's own on the CPU."""

import dgl
import dgl.function as fn
import dgl.nn
import pytest
import torch

import sar
from tests import pretend_gpu
from tests.gpu.places import PLACES, Place
from tests.hetero_graphs import partition_hetero
from tests.parity.harness import assert_close, build, deal, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS

LAYERS = (
    lambda: dgl.nn.SAGEConv(6, 4, "pool"),
    lambda: dgl.nn.GATConv(6, 2, 2, allow_zero_in_degree=True),
    lambda: dgl.nn.EdgeConv(6, 4, batch_norm=True, allow_zero_in_degree=True),
    lambda: dgl.nn.RelGraphConv(6, 4, 2),
)


def results(batch, x, w, device):
    """Outputs of the layers on a block, and gradients of the features."""
    found = []
    for make in LAYERS:
        torch.manual_seed(3)
        layer, h = make().to(device, x.dtype), x.detach().clone().requires_grad_()
        given = ((w[:, 0] > 1).long(),) if isinstance(layer, dgl.nn.RelGraphConv) else ()
        out = layer(batch, h, *given).flatten(1)
        weighted_sum(out, out.detach().cos()).backward()
        found += [out, h.grad]
    with batch.local_scope():
        batch.srcdata["x"], batch.edata["w"] = x, w
        batch.update_all(fn.u_mul_e("x", "w", "m"), lambda nodes: {"h": nodes.mailbox["m"].max(1).values})
        found.append(batch.dstdata["h"])
    degrees = [batch.in_degrees(), batch.out_degrees(), batch.srcdata[dgl.NID], batch.dstdata[dgl.NID]]
    return [each.detach() for each in (*found, *degrees)]


def of_layers(graph, data, target):
    """Of a block of every second node."""
    sampler = sar.DistNeighborSampler(
        [2, 3], copy_edata=True, input_node_features={"x": data.nodes["x"]}, output_device=target
    )
    block, _ = sampler.sample(graph, graph.node_ids()[::2])
    return results(block, block.srcdata["x"], block.edata["w"], target or "cpu")


def pair_results(pairs):
    """Scores of pairs in their order, what functions make of them, and the gradient of the nodes' features."""
    x = torch.outer(pairs.ndata[dgl.NID] + 1.0, torch.arange(1.0, 7.0).to(pairs.device)).sin().requires_grad_()
    w = torch.arange(1.0, pairs.num_edges() + 1).to(x)
    found = []
    with pairs.local_scope():
        pairs.ndata["x"], pairs.edata["w"] = x, w.unsqueeze(1)
        pairs.apply_edges(fn.u_dot_v("x", "x", "score"))
        pairs.apply_edges(lambda edges: {"other": (edges.src["x"] - edges.dst["x"]) * edges.data["w"]})
        pairs.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "h"))
        pairs.update_all(fn.u_mul_e("x", "w", "m"), lambda nodes: {"max": nodes.mailbox["m"].max(1).values})
        found += [pairs.edata["score"], pairs.edata["other"], pairs.ndata["h"], pairs.ndata["max"]]
    sum(weighted_sum(each, each.detach().cos()) for each in found).backward()
    return [*found, x.grad, *(pairs.edata[name] for name in sorted(pairs.edata.keys()))]


def of_pair_graphs(graph, data, target):
    inner = sar.DistNeighborSampler([2], copy_edata=True, output_device=target)
    edges = graph.edata[dgl.EID].flip(0)[::2]
    _, *pairs, blocks = sar.EdgePredictionSampler(inner, negative_sampler=2).sample(graph, edges)
    there_and_back = [of_pairs.to("cpu").to(target or "cpu") for of_pairs in pairs]
    made = [each for of_pairs in (*pairs, *there_and_back) for each in pair_results(of_pairs)]
    return [*made, blocks[-1].dstdata[dgl.NID]]


def typed_parts(workers):
    """Two node types, of which one has fewer nodes than there are edges into it, and one relation without edges."""
    torch.manual_seed(5)
    ends = {kind: (torch.randint(n, (40,)), torch.randint(m, (40,))) for kind, n, m in (("r", 9, 7), ("s", 7, 9))}
    none = torch.empty(0, dtype=torch.int64)
    edges = {("a", "r", "b"): ends["r"], ("b", "s", "a"): ends["s"], ("b", "t", "b"): (none, none)}
    graph = dgl.heterograph(edges, num_nodes_dict={"a": 9, "b": 7})
    for ntype in graph.ntypes:
        graph.nodes[ntype].data["x"] = torch.randn(graph.num_nodes(ntype), 6, dtype=torch.float64)
    assignment = {ntype: torch.arange(graph.num_nodes(ntype)) % workers for ntype in graph.ntypes}
    return partition_hetero(graph, assignment, workers).partitions


def of_types(graph, features, target):
    sampler = sar.DistNeighborSampler([3, 2], input_node_features=features, output_device=target)
    block, last = sampler.sample(graph, {"a": torch.arange(graph.num_nodes("a"))})
    of_types = {kind: dgl.nn.SAGEConv(6, 4, "mean") for kind in ("r", "s", "t")}
    layer = dgl.nn.HeteroGraphConv(of_types).to(target or "cpu", torch.float64)
    out = layer(block, block.srcdata["x"])
    return [*out.values(), block.srcnodes["b"].data[dgl.NID], last.dstnodes["a"].data[dgl.NID]]


def on_both(mine, device, program):
    """What a program gives on batches of the CPU, which are DGL's, and on those of the device."""
    if device == pretend_gpu.NAME:
        pretend_gpu.install()
    sar.patch_dgl()
    partition, data = mine
    found = []
    for target in (None, device):
        with pretend_gpu.in_place_of(device):
            torch.manual_seed(1)
            graph = build(partition, 1)
            if graph.is_homogeneous:
                graph.edata["w"] = data.edges["w"]
            made = program(graph, data, target)
            assert {each.device.type for each in made} == {target or "cpu"}
            found.append([each.detach().cpu() for each in made])
    return found


@pytest.mark.parametrize("program", [of_layers, of_pair_graphs, of_types])
@pytest.mark.parametrize("place", PLACES, indirect=True, ids=str)
def test_batches(place: Place, program):
    if program is of_types:
        mine = [
            (part, {name: rows for name, rows in part.node_features.items() if name.endswith("/x")})
            for part in typed_parts(place.world_size)
        ]
    else:
        parts = SCENARIOS["random"](place.world_size)
        mine = deal(parts, random_data(parts, torch.float64))
    for expected, found in place.pool.run(on_both, place.device, program, per_rank=mine):
        for value, wanted in zip(found, expected, strict=True):
            assert_close(value, wanted) if value.is_floating_point() else torch.testing.assert_close(value, wanted)
