"""Workers whose copies of the model drift apart hear of it in the next distributed call."""

import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import sar
from sar.comm.session import current_group
from tests.core.attempts import assert_disagreement, catch, catch_and_recover
from tests.parity.harness import deal, random_data
from tests.parity.pyg_layers import random_parts

RIGHT = {"sync": True, "gather": True, "skip": False, "check": True}


def model_of(seed, dtype):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def train(sync, gather, skip, check, dtype, make_optimizer):
    """Two steps on other rows on every worker, and a distributed call."""
    sar.Config.check_replicas = check
    model = model_of(sar.rank(), dtype)
    if sync:
        sar.sync_params(model)
    optimizer = make_optimizer(model)
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(sar.rank())).to(dtype)
    for _ in range(2):
        optimizer.zero_grad()
        model(rows).square().sum().backward()
        if gather:
            sar.gather_grads(model)
        if not (skip and sar.rank() == 1):
            optimizer.step()
    sar.comm.all_reduce(torch.ones(1))
    return [parameter.detach() for parameter in model.parameters()]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def two_groups(model):
    """The second half of the parameters comes later."""
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.1}], lr=0.01, momentum=0.9)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    return optimizer


def zero(model):
    """Each worker steps a share of the parameters, and gets the others."""
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)


def failed(forgotten, dtype, make_optimizer):
    return catch(train, *(RIGHT | forgotten).values(), dtype, make_optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make_optimizer", [adam, two_groups, pytest.param(zero, marks=pytest.mark.processes("ZeRO"))])
@pytest.mark.parametrize("world_size", [2])
def test_a_right_loop(pool, make_optimizer, dtype):
    first, second = pool.run(train, *RIGHT.values(), dtype, make_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def own_rate(model):
    """As a scheduler leaves it that goes by the worker's own loss."""
    return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + sar.rank()))


SYNC, GATHER = "sync_params(model), which", "stepped without gather_grads(model), which"


@pytest.mark.parametrize(
    "forgotten, dtype, make_optimizer, words",
    [
        ({"sync": False}, torch.float32, adam, [SYNC]),
        ({"gather": False}, torch.float32, adam, [GATHER]),
        ({"gather": False}, torch.bfloat16, two_groups, [GATHER]),
        ({"sync": False, "gather": False}, torch.float32, adam, [SYNC, GATHER]),
        ({"skip": True}, torch.float32, adam, ["no optimizer has stepped the model on workers [1]"]),
        ({}, torch.float32, own_rate, ["learning rate", "sar.all_sum"]),
    ],
    ids=["not synchronised", "not gathered", "not gathered, bfloat16", "neither", "no step", "own rate"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_makes_workers_drift(pool, forgotten, dtype, make_optimizer, words):
    failures = pool.run(failed, forgotten, dtype, make_optimizer)
    if "skip" not in forgotten:
        words = [*words, "worker 0 and worker 1 differ", "Config.check_replicas"]
    assert_disagreement(failures, *words)
    assert all((GATHER in failure.message) == (GATHER in words) for failure in failures)


@pytest.mark.parametrize("world_size", [2])
def test_it_can_be_turned_off_but_on_all_workers(pool):
    off = {"gather": False, "check": False}
    first, second = pool.run(train, *(RIGHT | off).values(), torch.float32, adam)
    assert not torch.equal(first[0], second[0])
    assert_disagreement(pool.run(off_on_one), "Config.check_replicas is False on workers [1] only")


def off_on_one():
    sar.Config.check_replicas = sar.rank() != 1
    return catch(sar.comm.all_reduce, torch.ones(1))


def last_layer(change):
    """Everything is right, until worker 0 alone changes one element of the last bias."""
    model = model_of(0, torch.float32)
    sar.sync_params(model)
    optimizer = adam(model)
    sar.gather_grads(model)
    optimizer.step()
    with torch.no_grad():
        if sar.rank() == 0 and change == "sign of zero":
            model[2].bias.zero_().neg_()
        elif change == "sign of zero":
            model[2].bias.zero_()
        elif sar.rank() == 0:
            model[2].bias.copy_(model[2].bias.flip(0))
    optimizer.step()
    return catch(sar.gather_grads, model)


@pytest.mark.parametrize("change", ["sign of zero", "order"])
@pytest.mark.parametrize("world_size", [2])
def test_one_changed_element_is_noticed(pool, change):
    assert_disagreement(pool.run(last_layer, change), "models are not the same", "something has changed a parameter")


def own_parameters():
    """Rows for a worker's nodes, as parameters of different and of equal shape and as a tensor; a model of worker 0
    alone; and then replicas drift."""
    model = model_of(0, torch.float32)
    sar.sync_params(model)
    rows, others = nn.Parameter(torch.randn(3 + sar.rank(), 4)), nn.Parameter(torch.full((4,), float(sar.rank())))
    tensor = torch.full((4,), float(sar.rank()), requires_grad=True)
    optimizer = torch.optim.SGD([rows, others, tensor, *model.parameters()], lr=0.1)
    alone = torch.optim.SGD(model_of(7, torch.float32).parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (model(rows) @ torch.ones(2) + tensor.sum() + others.sum()).sum().backward()
        sar.gather_grads(model)
        optimizer.step()
        if sar.rank() == 0:
            alone.step()
        sar.comm.all_reduce(torch.ones(1))
    with torch.no_grad():
        model[0].weight += sar.rank()
    optimizer.step()
    return catch(sar.gather_grads, model)


@pytest.mark.parametrize("world_size", [2])
def test_what_is_a_workers_own_is_left_out(pool):
    assert_disagreement(pool.run(own_parameters), "models are not the same")


class Holder(nn.Module):
    """A model that holds features of own nodes as a buffer, and statistics as long as an even part."""

    def __init__(self, x):
        super().__init__()
        self.norm = sar.DistributedBN1D(15)
        self.norm.running_mean += sar.rank()
        self.register_buffer("x", x, persistent=False)
        self.register_buffer("table", torch.rand(7))


def held(mine, values):
    """What `sync_params` says; whether the buffer is as it was, and what the others are then."""
    partition, data = mine
    current_group().own_sizes.clear()  # of graphs of other tests
    sar.construct_full_graph(partition)
    torch.manual_seed(sar.rank())
    x = data.nodes["x"] if values == "own" else torch.ones_like(data.nodes["x"])
    model = Holder(x.clone())
    failure = catch_and_recover(sar.sync_params, model)
    return failure, torch.equal(model.x, x), model.table, model.norm.running_mean


@pytest.mark.parametrize("parts, values", [("even", "own"), ("even", "equal"), ("uneven", "own")])
@pytest.mark.parametrize("world_size", [2])
def test_buffers_of_own_rows_are_not_replaced(pool, parts, values):
    """Whether workers have equally many nodes or not."""
    of_each = random_parts(2, even=parts == "even")
    found = pool.run(held, values, per_rank=deal(of_each, random_data(of_each)))
    assert all(kept for _, kept, *_ in found)
    if values == "own":
        assert_disagreement([failure for failure, *_ in found], "float32[1", "self.x = x.to(device)")
    else:
        (_, _, table, mean), (failure, _, *copies) = found
        assert failure is None
        assert torch.equal(copies[0], table)
        assert torch.equal(copies[1], mean)


class Sized(nn.Module):
    """A layer of another width on worker 1, after one that is the same everywhere."""

    def __init__(self, width, more):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, width, bias=more)


def give(size, call):
    return catch(call, Sized(*size))


@pytest.mark.parametrize("call", [sar.sync_params, sar.gather_grads])
@pytest.mark.parametrize(
    "sizes, lines",
    [
        ([(4, True), (5, True)], ["worker 0: second.weight float32[4, 3]", "worker 1: second.weight float32[5, 3]"]),
        ([(4, True), (4, False)], ["worker 0: second.bias float32[4]", "worker 1: nothing"]),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_different_models(pool, call, sizes, lines):
    assert_disagreement(pool.run(give, call, per_rank=sizes), call.__name__, *lines)


def warned(make):
    # Tests of PyTorch Geometric in the same worker let the layer look whose rows it gets.
    plain = mock.patch.object(nn.BatchNorm1d, "__call__", nn.Module.__call__)
    with plain, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = make()
        sar.sync_params(model)
        for _ in range(2):
            sar.gather_grads(model)
    return [str(warning.message) for warning in found]


def with_batch_norm():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def converted():
    return sar.convert_batchnorm(with_batch_norm())


@pytest.mark.parametrize("world_size", [2])
def test_batch_norm_of_one_worker_is_told_once(pool):
    for messages in pool.run(warned, with_batch_norm):
        [message] = messages
        assert "1 is a BatchNorm1d" in message
        assert "sar.convert_batchnorm(model)" in message
    assert pool.run(warned, converted) == [[], []]
