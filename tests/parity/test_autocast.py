"""`torch.autocast` around layers: as close to float32 DGL as bfloat16 allows, and to DGL under the same autocast."""

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import nn

import sar
from sar import comm
from tests.parity.harness import (
    build,
    check,
    deal,
    parameter_gradients,
    random_data,
    random_shares,
    run_everywhere,
    weighted_sum,
)
from tests.parity.programs import pairwise, weighted
from tests.parity.pyg_layers import edges_of
from tests.parity.scenarios import SCENARIOS

IN, OUT = 6, 4
TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps


class PythonMessages(nn.Module):
    """A learned message, in bfloat16 under autocast, times a float32 weight."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(IN, OUT)

    def forward(self, graph, x, w):
        def message(edges):
            return {"m": self.message(edges.src["h"]), "n": self.message(edges.dst["h"]) * edges.data["w"]}

        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = x, w
            graph.apply_edges(message)
            graph.edata["mn"] = graph.edata["m"].tanh() + graph.edata["n"]
            graph.update_all(fn.copy_e("mn", "m"), fn.mean("m", "out"))
            graph.update_all(lambda edges: {"m": self.message(edges.src["h"])}, fn.sum("m", "more"))
            return graph.ndata["out"] + graph.ndata["more"]


class OneRelation(nn.Module):
    """`HeteroGraphConv`, with its dictionaries."""

    def __init__(self):
        super().__init__()
        self.convs = dgl.nn.HeteroGraphConv({"_E": dgl.nn.SAGEConv(IN, OUT, "mean")})

    def forward(self, graph, x):
        return self.convs(graph, {"_N": x})["_N"]


def plain(layer, graph, x, w):
    return layer(graph, x)


def by_edge_index(layer, graph, x, w):
    return layer(x, edges_of(graph))


def edge_weight(layer, graph, x, w):
    return layer(graph, x, edge_weight=w.squeeze(1))


def edge_feature(layer, graph, x, w):
    return layer(graph, x, w)


def graph_conv(out, norm="both", bias=True):
    return dgl.nn.GraphConv(IN, out, norm=norm, bias=bias, allow_zero_in_degree=True)


LAYERS = {
    "GraphConv": (lambda: graph_conv(OUT), plain),
    "GraphConv equal": (lambda: graph_conv(IN), plain),
    "GraphConv wider": (lambda: graph_conv(8), plain),
    "GraphConv wider, without bias": (lambda: graph_conv(8, norm="right", bias=False), plain),
    "GraphConv left": (lambda: graph_conv(OUT, norm="left"), plain),
    "GraphConv left, without bias": (lambda: graph_conv(8, norm="left", bias=False), plain),
    "GraphConv weighted": (lambda: dgl.nn.GraphConv(IN, OUT, allow_zero_in_degree=True), edge_weight),
    "SAGEConv": (lambda: dgl.nn.SAGEConv(IN, OUT, "mean"), plain),
    "SAGEConv equal": (lambda: dgl.nn.SAGEConv(IN, IN, "mean"), plain),
    "SAGEConv wider": (lambda: dgl.nn.SAGEConv(IN, 8, "mean"), plain),
    "SAGEConv weighted": (lambda: dgl.nn.SAGEConv(IN, OUT, "gcn"), edge_weight),
    "GATConv": (lambda: dgl.nn.GATConv(IN, 2, 2, residual=True, allow_zero_in_degree=True), plain),
    "GATv2Conv": (lambda: dgl.nn.GATv2Conv(IN, 2, 2, allow_zero_in_degree=True), plain),
    "DotGatConv": (lambda: dgl.nn.DotGatConv(IN, 2, 2, allow_zero_in_degree=True), plain),
    "HeteroGraphConv": (OneRelation, plain),
    "PyG GCNConv": (lambda: pyg.GCNConv(IN, OUT, cached=True), by_edge_index),
    "PyG GATConv": (lambda: pyg.GATConv(IN, 2, 2), by_edge_index),
    "Python messages": (PythonMessages, edge_feature),
}
ATTENTION = ("GATConv", "GATv2Conv", "PyG GATConv")
MIXED = ("GraphConv weighted", "SAGEConv weighted", *ATTENTION)
"""Layers whose operands autocast mixes: DGL on the CPU refuses them."""


def round_projections(layer):
    """Let linear layers compute under autocast, the rest in float32: slopes of a leaky ReLU depend on that rounding."""
    for module in [each for each in layer.modules() if isinstance(each, (nn.Linear, pyg.Linear))]:

        def forward(x, original=module.forward):
            with torch.autocast("cpu", torch.bfloat16):
                return original(x).float()

        module.forward = forward


def gradients(graph, data, name, autocast_in_dgl):
    """The forward under autocast, on one machine only if asked for; the backward outside, as torch advises."""
    if dist.is_initialized():
        sar.patch_dgl()
    build, call = LAYERS[name]
    layer = build()
    if name in ATTENTION and not dist.is_initialized():
        round_projections(layer)
    x, w = data.leaf("x"), data.leaf("w")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast_in_dgl or dist.is_initialized()):
        out = call(layer, graph, x, w).flatten(1)
    weighted_sum(out.float(), data.nodes["cotangent"]).backward()
    results = {"node output": out.float(), "node x.grad": x.grad, **parameter_gradients(layer)}
    if autocast_in_dgl:  # which has an output of the same dtype
        results["same bytes of a number"] = torch.tensor(float(out.itemsize))
    return results if w.grad is None else {**results, "edge w.grad": w.grad}


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(gradients, (name, False)) for name in LAYERS]
    cases += [(gradients, (name, True)) for name in LAYERS if name not in MIXED]
    check(pool, parts, random_data(parts), cases, tolerance=TOLERANCE, least_scale=1)


@pytest.mark.parametrize("world_size", [2])
def test_replays_run_under_the_autocast_of_the_forward(pool, world_size):
    """Mode 1 computes messages again in the backward, mode 2 has kept them; bfloat16 would show."""
    parts = SCENARIOS["isolated"](world_size)
    cases = [(gradients, (name, True)) for name in LAYERS]
    results = run_everywhere(pool, parts, random_data(parts), cases, (1, 2))
    for again, kept in zip(results[1], results[2], strict=True):
        for name, value in kept.items():
            assert torch.allclose(again[name], value, rtol=1e-5, atol=1e-5), name


def bytes_sent(mine, name, mode, autocast):
    """Bytes that this worker sends in the forward and in the backward of a layer."""
    (partition, data), (build_layer, call) = mine, LAYERS[name]
    sar.patch_dgl()
    graph, layer, x, w = build(partition, mode), build_layer(), data.leaf("x"), data.leaf("w")
    with torch.no_grad():
        call(layer, graph, x, w)  # PyTorch Geometric's keeps weights of edges
    start = comm.statistics().bytes_sent
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = call(layer, graph, x, w)
    middle = comm.statistics().bytes_sent
    out.float().sum().backward()
    return middle - start, comm.statistics().bytes_sent - middle


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Python messages"])
def test_rows_and_their_gradients_travel_in_bfloat16(pool, world_size, name):
    mine = random_shares(world_size)
    for mode in (1, 2, 3):
        for wide, half in zip(
            *(pool.run(bytes_sent, name, mode, on, per_rank=mine) for on in (False, True)), strict=True
        ):
            for each, of_half in zip(wide, half, strict=True):
                assert 0 < of_half <= 0.6 * each, (mode, half, wide)  # of small messages, alignment shows


def mixed(graph, data, program, dtype, autocast):
    x, w = data.nodes["x"].to(dtype).requires_grad_(), data.leaf("w")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dist.is_initialized()):
        out = program(graph, x if dist.is_initialized() else x.to(w.dtype), w)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node output": out, "node x.grad": x.grad.to(w.dtype), "edge w.grad": w.grad}


@pytest.mark.parametrize("world_size", [2])
def test_operands_promote_to_the_wider_dtype(pool, world_size):
    """So nothing is lost but by rounding the gradient of a narrow operand."""
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts), [(mixed, (weighted, torch.bfloat16, True))], tolerance=TOLERANCE)
    data = random_data(parts, torch.float64)
    data.nodes["x"] = data.nodes["x"].float().double()
    check(pool, parts, data, [(mixed, (weighted, torch.float32, True))], tolerance=1e-6)


def scaled_steps(mine, factors):
    """A step of gradient descent for each of this worker's factors of its loss; parameters and scale after it."""
    partition, data = mine
    graph = sar.construct_full_graph(partition)
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    states = []
    for factor in factors[sar.rank()]:
        optimizer.zero_grad()
        loss = weighted_sum(pairwise(graph, layer(data.nodes["x"]), data.edges["w"]), data.nodes["cotangent"]) * factor
        scaler.scale(loss).backward()
        sar.gather_grads(layer)
        scaler.step(optimizer)
        scaler.update()
        states.append((layer.weight.detach().clone(), scaler.get_scale()))
    return states


@pytest.mark.parametrize("world_size", [2])
def test_grad_scaler_skips_a_step_on_all_workers_or_on_none(pool):
    """An infinite gradient of one worker is everybody's once it is gathered."""
    parts = SCENARIOS["random"](2)
    mine = deal(parts, random_data(parts))
    factors = [[1.0, 1.0, 1.0], [1.0, torch.inf, 1.0]]
    first, second = pool.run(scaled_steps, factors, per_rank=mine)
    for (mine_weight, mine_scale), (weight, scale) in zip(first, second, strict=True):
        assert torch.equal(mine_weight, weight)
        assert mine_scale == scale
    (before, scale), (skipped, halved), (after, _) = first
    assert torch.equal(before, skipped)
    assert halved == scale / 2
    assert not torch.equal(after, before)
    assert after.isfinite().all()
