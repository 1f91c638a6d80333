"""`sync_params` and `gather_grads`."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import sar
from sar.comm import collectives
from sar.comm.session import current_group
from sar.logging_setup import logger
from tests.core.attempts import catch_and_recover
from tests.matrix import corner


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes and shapes, one of them scalar, one transposed, one frozen."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 2)
        self.scalar = nn.Parameter(torch.randn(()))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.strided = nn.Parameter(torch.randn(3, 4).t())
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.register_buffer("steps", torch.randint(0, 100, ()))
        self.register_buffer("mask", torch.rand(7) > 0.5)


def synced():
    current_group().own_sizes.clear()  # of graphs of other tests
    model = Mixed(sar.rank())
    sar.sync_params(model)
    return dict(model.state_dict()), model.linear.weight.requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sync_params_copies_those_of_worker_0(pool, world_size):
    expected = Mixed(0).state_dict()
    for state, requires_grad in pool.run(synced):
        assert requires_grad
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def set_gradients(model, rank):
    """Gradients by rank: `scalar` has one on rank 1 only, `unused` none anywhere."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or name == "unused" or (name == "scalar" and rank != 1):
            continue
        generator = torch.Generator().manual_seed(rank)
        parameter.grad = torch.randint(-8, 8, parameter.shape, generator=generator).to(parameter.dtype)
    # In bfloat16, two of the sums of three workers are rounded, whatever the order.
    model.narrow.grad = torch.full((5,), (94.5, 88.0, 0.12353515625)[rank % 3], dtype=torch.bfloat16)


def gathered(bucket_elements):
    collectives.BUCKET_ELEMENTS, before = bucket_elements, collectives.BUCKET_ELEMENTS
    model = Mixed(0)
    set_gradients(model, sar.rank())
    sar.gather_grads(model)
    collectives.BUCKET_ELEMENTS = before
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("bucket_elements", [1, 7, 2**20])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gather_grads_sums(pool, world_size, bucket_elements):
    models = [Mixed(0) for _ in range(world_size)]
    for rank, model in enumerate(models):
        set_gradients(model, rank)
    expected = {}
    for name, parameter in models[0].named_parameters():
        grads = [dict(model.named_parameters())[name].grad for model in models]
        present = [grad for grad in grads if grad is not None]
        expected[name] = torch.stack(present).sum(0).to(parameter.dtype) if present else None
    assert expected["unused"] is None
    assert expected["frozen"] is None
    assert (expected["scalar"] is None) == (world_size == 1)
    for grads in pool.run(gathered, bucket_elements):
        assert grads.keys() == expected.keys()
        for name, value in expected.items():
            if value is None:
                assert grads[name] is None, name
            else:
                assert torch.equal(grads[name], value), name


class Training:
    """A model, its optimizers, and the calls of a loop around the sums; on one machine `gather` does nothing."""

    def __init__(self, gather, rows):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.model[1].weight
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.gather, self.rows = gather, rows

    def backward(self, scale=1.0):
        loss = (self.head(self.model(self.rows)) ** 2).sum() * scale
        self.scaler.scale(loss).backward() if scale == torch.inf else loss.backward()

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def shrink(self):
        for p in self.model.parameters():
            p.grad *= 0.5

    def unscale(self):
        self.scaler.scale(torch.ones(()))
        self.scaler.unscale_(self.sgd)

    def step(self):
        self.sgd.step()

    def step_by_hand(self):
        for p in self.model.parameters():
            p.data -= 0.1 * p.grad

    def step_of_head(self):
        torch.optim.Adam(self.model[1].parameters(), lr=0.1, foreach=True).step()
        self.model[1].zero_grad()

    def skipped_step(self):
        self.scaler.step(self.sgd)
        self.scaler.update()

    def clear(self):
        self.sgd.zero_grad(set_to_none=True)

    def zero(self):
        self.sgd.zero_grad(set_to_none=False)

    def zero_data(self):
        for p in self.model.parameters():
            p.grad.data.zero_()

    def overflow(self):
        self.backward(torch.inf)

    def look(self):
        return torch.autograd.grad(self.model(self.rows).square().sum(), self.model.parameters())

    def write(self):
        """Gradients that the loop writes by hand."""
        for p, grad in zip(self.model.parameters(), self.look(), strict=True):
            p.grad.copy_(grad)

    def sum(self):
        self.gather(self.model)

    def sum_first(self):
        self.gather(self.model[0])

    def sum_head(self):
        self.gather(self.head)


def run_training(calls, rows=None):
    """The gradients after these calls; on one machine, if `rows` are all."""
    if rows is None:
        training = Training(sar.gather_grads, rows_of_training(sar.rank()))
    else:
        training = Training(lambda model: None, rows)
    for call in calls.split():
        getattr(training, call)()
    return [p.grad for p in training.model.parameters()]


def rows_of_training(rank):
    return torch.randn(3 + rank, 3, generator=torch.Generator().manual_seed(rank))


CALLS = """
backward sum clear backward sum
backward sum step clear backward sum
backward sum zero backward sum
backward sum step zero backward sum
backward sum step_by_hand zero backward sum
backward sum step_by_hand zero_data backward sum
backward sum zero zero backward backward sum
overflow sum skipped_step zero backward sum
backward backward sum clip step
backward sum look
backward sum clip step clear backward sum clip
backward sum unscale step zero backward sum
backward sum step write sum
backward sum_first sum
backward sum_first shrink backward sum
backward sum_head sum
backward sum step_of_head backward sum
backward sum step_of_head backward sum step_of_head backward sum clip
backward sum step_of_head backward backward sum
"""


@pytest.mark.parametrize("calls", CALLS.strip().splitlines())
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_are_those_of_one_machine(pool, world_size, calls):
    expected = run_training(calls, torch.cat([rows_of_training(rank) for rank in range(world_size)]))
    for grads in pool.run(run_training, calls):
        for actual, grad in zip(grads, expected, strict=True):
            assert torch.allclose(actual, grad, atol=1e-5, equal_nan=True)


def failed_training(calls):
    return catch_and_recover(run_training, calls)


BETWEEN = ",backward,clip,shrink,unscale,backward clip,clip backward,step,step backward,clip step backward"


@pytest.mark.parametrize("between", BETWEEN.split(","))
@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_are_not_summed(pool, world_size, between):
    for said in pool.run(failed_training, f"backward sum {between} sum"):
        assert said.kind == "ConfigError"
        assert "the gradients are sums over the workers already" in said.message


def refused(kind):
    """Only worker 0 has what is refused; all workers raise."""
    if kind == "lazy":
        model = nn.LazyLinear(2) if sar.rank() == 0 else nn.Linear(3, 2)
        return [catch_and_recover(call, model) for call in (sar.sync_params, sar.gather_grads)]
    model = nn.Sequential(nn.Embedding(5, 2, sparse=sar.rank() == 0))
    model(torch.tensor([1, 3])).sum().backward()
    return [catch_and_recover(sar.gather_grads, model)]


@pytest.mark.parametrize(
    "kind, words",
    [("lazy", "weight has no shape yet"), ("sparse", "the gradient of 0.weight is torch.sparse_coo; expected a dense")],
)
@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_sent_is_refused_by_name(pool, kind, words):
    for rank, failures in enumerate(pool.run(refused, kind)):
        for failure in failures:
            assert failure.kind == ("ConfigError" if rank == 0 else "PeerError")
            assert words in failure.message


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def logged(mistake, synced):
    """The lines that worker 0 logs in three steps."""
    current_group().has_summed = False  # of other tests
    training, handler = Training(sar.gather_grads, rows_of_training(sar.rank())), Lines()
    task = sar.Task(torch.zeros(len(training.rows)), {"train": torch.ones(len(training.rows))})
    logger.addHandler(handler)
    if synced:
        sar.sync_params(copy.deepcopy(training.model))
        sar.sync_params(training.model)
    if mistake != "loss":
        task.loss(training.model(training.rows))
    for _ in range(3):
        training.clear()
        training.backward()
        training.backward()
        if mistake == "clip":
            training.clip()
        training.sum()
        training.clip()
    logger.removeHandler(handler)
    pickle.loads(pickle.dumps(training.model))
    return handler.lines


def logged_nan(kinds):
    """What is logged of two sums of gradients, in which the last workers' numbers in a parameter are `kinds`."""
    model, handler = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Lines()
    logger.addHandler(handler)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        if kinds and sar.rank() in kinds:
            model[1].bias.grad[:] = kinds[sar.rank()]
        sar.gather_grads(model)
    logger.removeHandler(handler)
    return [line for line in handler.lines if "NaN" in line]


@pytest.mark.parametrize(
    "kinds, source",
    [
        ({}, None),
        ({0: 2e38}, None),  # twice, which is finite, but not their sum
        ({1: torch.nan}, "workers [1] brought it, first in 1.bias"),
        ({0: torch.inf, 1: -torch.inf}, "workers [0, 1] brought it, first in 1.bias"),
        ({0: 3e38, 1: 3e38}, "the gradients of each worker are finite"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_whoever_brings_nan_is_told_once(pool, world_size, kinds, source):
    first, other = pool.run(logged_nan, kinds)
    assert other == []
    assert len(first) == (source is not None), first
    assert all(source in line for line in first)


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("mistake", ["loss", "clip", "none"])
@pytest.mark.parametrize("world_size", [2, corner(1)])
def test_beginners_mistakes_are_told_once(pool, world_size, mistake, synced):
    first, *others = pool.run(logged, mistake, synced)
    assert not any(others)
    words = {"loss": "about 2 times too large", "clip": "clipped or unscaled"}
    expected = [words[mistake]] if mistake in words and world_size > 1 else []
    assert len(first) == len(expected), first
    assert all(word in line for word, line in zip(expected, first, strict=True))
