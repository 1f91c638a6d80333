"""Halos in half precision: fewer bytes, small differences, and only where they were asked for."""

import dgl.function as fn
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


def gradients_of_sizes(mine, features, factors):
    """By factor, the result and the gradients of a product that is scaled by it on one side or the other."""
    partition, data = mine
    sar.Config.wire_dtype_features = sar.Config.wire_dtype_gradients = torch.float16
    graph, found = build(partition, 1), []
    for factor in factors:
        x, w = (data.nodes["x"] * (factor if features else 1)).requires_grad_(), data.leaf("w")
        with graph.local_scope():
            graph.ndata["x"], graph.edata["w"] = x, w
            graph.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "out"))
            out = graph.ndata["out"]
            (weighted_sum(out, data.nodes["cotangent"]) * (1 if features else factor)).backward()
        found.append([value / factor for value in ((out.detach(), w.grad) if features else (x.grad, w.grad))])
    return found


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("features", [True, False], ids=["features", "gradients"])
def test_float16_on_the_wire_does_not_depend_on_the_size_of_the_numbers(pool, world_size, features):
    """A loss divided by 1e8, as a global mean is, and features beyond 65504: bit for bit where the factor is exact."""
    parts = SCENARIOS["random"](world_size)
    mine = deal(parts, random_data(parts))
    for first, *others, rounded in pool.run(gradients_of_sizes, features, [1, 2.0**-27, 2.0**40, 1e-8], per_rank=mine):
        assert all(value.abs().max() > 0.1 for value in first)
        for other in others:
            assert all(map(torch.equal, other, first))
        for value, wanted in zip(rounded, first, strict=True):
            assert_close(value, wanted, 2e-3)


def wrong_setting(value):
    return catch(setattr, sar.Config, "wire_dtype_features", value)


@pytest.mark.parametrize("world_size", [1])
def test_other_types_are_refused(pool):
    """Only half precisions make sense."""
    for value in (torch.float32, torch.int8, "bfloat16"):
        (error,) = pool.run(wrong_setting, value)
        assert error.kind == "ConfigError"
