"""Halos in half precision: fewer bytes, small differences, and only where they were asked for."""

import dgl.nn
import pytest
import torch

import sar
from sar import comm
from tests.core.attempts import catch
from tests.parity.harness import assert_close, build, deal, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS


def layers():
    torch.manual_seed(0)
    return {
        "mean": dgl.nn.SAGEConv(6, 4, "mean"),
        "max": dgl.nn.SAGEConv(6, 4, "pool"),
        "attention": dgl.nn.GATConv(6, 2, 2, allow_zero_in_degree=True),
        "python": dgl.nn.EGNNConv(6, 8, 4),
    }


def run(mine, name, mode, features, gradients):
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
    (torch.float16, torch.bfloat16),
]


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", ["mean", "max", "attention", "python"])
@pytest.mark.parametrize(("features", "gradients"), HALVES, ids=str)
def test_half_precision_on_the_wire(pool, world_size, name, features, gradients):
    """Results differ, by little, and keep their dtype; each direction is halved by itself."""
    parts = SCENARIOS["random"](world_size)
    mine = deal(parts, random_data(parts))
    for mode in (1, 2, 3):
        exact = pool.run(run, name, mode, None, None, per_rank=mine)
        rounded = pool.run(run, name, mode, features, gradients, per_rank=mine)
        for (wanted, full), (results, sent) in zip(exact, rounded, strict=True):
            for key, value in wanted.items():
                assert_close(results[key], value, 0.1 if name == "max" else 0.03)
            assert torch.equal(results["out"], wanted["out"]) == (features is None)
            depends = gradients is not None or name in ("attention", "python")  # on the values of features
            assert torch.equal(results["x"], wanted["x"]) != depends
            assert (sent[0] < full[0]) == (features is not None)
            if name == "mean":
                assert (sent[1] < full[1]) == (gradients is not None)


def wrong_setting(value):
    return catch(setattr, sar.Config, "wire_dtype_features", value)


@pytest.mark.parametrize("world_size", [1])
def test_other_types_are_refused(pool, world_size):
    """Only half precisions make sense."""
    for value in (torch.float32, torch.int8, "bfloat16"):
        (error,) = pool.run(wrong_setting, value)
        assert error.kind == "ConfigError"
