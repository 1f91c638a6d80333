"""Gradients of half precisions add up in float32; halos in half precision differ by little, where asked for."""

import dgl.function as fn
import dgl.nn
import pytest
import torch

import sar
from sar import comm
from tests.graphs import partition_in_memory, random_graph
from tests.matrix import corner
from tests.parity.harness import (
    assert_close,
    build,
    deal,
    parameter_gradients,
    random_data,
    random_shares,
    weighted_sum,
)
from tests.parity.scenarios import scattered

BUFFERS = (1, 2**25)  # a tile for each row and few edges at a time, or all at once


def messages(graph, x, weight):
    """Sums and products of positive numbers, so that nothing cancels; `weight` is captured."""
    graph.ndata["h"] = x
    graph.update_all(lambda edges: {"m": (edges.src["h"] + edges.dst["h"]) * weight}, fn.sum("m", "out"))
    return graph.ndata.pop("out")


def gradients(graph, x, weight):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    messages(graph, x, weight).sum().backward()
    return x.grad, weight.grad


def fetched(graph, x, node_ids):
    x = x.clone().requires_grad_()
    (sar.fetch_rows(graph, x[:, 0], node_ids) * 1.3).sum().backward()
    return x.grad[:, 0]


def half_gradients(mine, dtype, weight, node_ids):
    """By size of the buffer: gradients of x and of the captured weight; and those of rows that are fetched often."""
    partition, data = mine
    x, made = data.nodes["x"].to(dtype), {}
    graph = build(partition, 1)
    for size in BUFFERS:
        sar.Config.comm_buffer_bytes = size
        made[size] = gradients(graph, x, weight)
    return made, fetched(graph, x, node_ids)


@pytest.mark.processes("in turns, a tile for each row takes minutes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, corner(torch.float16)], ids=str)
@pytest.mark.parametrize("world_size", [2])
def test_errors_do_not_grow_with_tiles(pool, world_size, dtype):
    parts = partition_in_memory(random_graph(0, 24, 3000), scattered(24, world_size), world_size)
    data = random_data(parts)
    data.nodes["x"] = (data.nodes["x"].abs() + 0.5).to(dtype).float()
    weight = (torch.rand(6, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    node_ids = torch.arange(24).repeat(300)
    results = pool.run(half_gradients, dtype, weight, node_ids, per_rank=deal(parts, data))

    expected = gradients(parts.reference(), data.nodes["x"].double(), weight.double())
    for size in BUFFERS:
        of_x = torch.cat([made[size][0] for made, _ in results])
        of_weight = [made[size][1].double() for made, _ in results]
        assert eps_off(of_x, expected[0]) < 1, size
        assert eps_off(sum(of_weight), expected[1], dtype) < 1, size
    of_node = torch.full((24,), 300.0 * world_size) * torch.tensor(1.3, dtype=dtype).double()
    assert eps_off(torch.cat([rows for _, rows in results]), of_node) < 1


def eps_off(actual, expected, dtype=None):
    """The greatest relative error, in units of the dtype's epsilon."""
    error = (actual.double() - expected) / expected
    return (error.abs().max() / torch.finfo(dtype or actual.dtype).eps).item()


# -- halos in half precision


def layers():
    torch.manual_seed(0)
    return {
        "mean": dgl.nn.SAGEConv(6, 4, "mean"),
        "max": dgl.nn.SAGEConv(6, 4, "pool"),
        "attention": dgl.nn.GATConv(6, 2, 2, allow_zero_in_degree=True),
        "python": dgl.nn.EGNNConv(6, 8, 4),
    }


def over_the_wire(mine, name, mode, features, gradients):
    """Output and gradients of a layer, and bytes sent in the forward and the backward."""
    partition, data = mine
    sar.patch_dgl()
    sar.Config.wire_dtype_features, sar.Config.wire_dtype_gradients = features, gradients
    graph, layer, x = build(partition, mode), layers()[name], data.leaf("x")
    start = comm.statistics()
    out = layer(graph, x, data.nodes["y"][:, :3])[0] if name == "python" else layer(graph, x)
    middle = comm.statistics()
    weighted_sum(out, data.nodes["cotangent"]).backward()
    sent = (middle - start).bytes_sent, (comm.statistics() - middle).bytes_sent
    return {"out": out.detach(), "x": x.grad, **parameter_gradients(layer)}, sent


HALVES = [
    (torch.bfloat16, None),
    (None, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", ["mean", "max", "attention", "python"])
@pytest.mark.parametrize(("features", "gradients"), HALVES, ids=str)
def test_half_precision_on_the_wire(pool, world_size, name, features, gradients):
    """Results differ, by little, and keep their dtype; each direction is halved by itself."""
    mine = random_shares(world_size)
    for mode in (1, 2, 3):
        exact = pool.run(over_the_wire, name, mode, None, None, per_rank=mine)
        rounded = pool.run(over_the_wire, name, mode, features, gradients, per_rank=mine)
        for (wanted, full), (results, sent) in zip(exact, rounded, strict=True):
            for key, value in wanted.items():
                assert_close(results[key], value, 0.1 if name == "max" else 0.03)
            assert torch.equal(results["out"], wanted["out"]) == (features is None)
            depends = gradients is not None or name in ("attention", "python")  # on the values of features
            assert torch.equal(results["x"], wanted["x"]) != depends
            assert (sent[0] < full[0]) == (features is not None)
            if name == "mean":
                assert (sent[1] < full[1]) == (gradients is not None)
