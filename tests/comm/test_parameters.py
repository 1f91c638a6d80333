"""`sync_params` and `gather_grads`."""

import pytest
import torch
from torch import nn

import sar
from sar.comm import collectives
from tests.core.attempts import catch_and_recover


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


def summed_again(between):
    """What a second call says, after the first and what is done in between."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1:].parameters() if between == "step of some" else model.parameters(), lr=0.1)

    def backward():
        model(torch.ones(1, 3)).sum().backward()

    backward()
    sar.gather_grads(model)
    if between == "backward":
        backward()
    elif between != "nothing":
        optimizer.step()
        optimizer.zero_grad(set_to_none=between != "cleared in place")
        backward()
    return catch_and_recover(sar.gather_grads, model)


@pytest.mark.parametrize("between", ["nothing", "backward", "step", "step of some", "cleared in place"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_are_not_summed(pool, world_size, between):
    for said in pool.run(summed_again, between):
        if between in ("nothing", "backward"):
            assert said.kind == "ConfigError"
            assert "the gradients are sums over the workers already" in said.message
        else:
            assert said is None


def nothing_to_gather():
    sar.gather_grads(nn.ReLU())
    model = nn.Linear(2, 2)
    sar.gather_grads(model)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [2])
def test_no_gradients_at_all(pool):
    assert pool.run(nothing_to_gather) == [[None, None]] * 2


def one_training_step(rows):
    """Loss = local sum / global count, then the sum over workers: the gradient of the mean over all rows."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    (model(rows).square().sum() / 9).backward()
    sar.gather_grads(model)
    return model.weight.grad


@pytest.mark.parametrize("world_size", [3])
def test_the_loss_convention(pool):
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model(rows).square().mean().backward()
    for grad in pool.run(one_training_step, per_rank=list(rows.split([0, 5, 4]))):
        assert torch.allclose(grad, model.weight.grad, atol=1e-6)


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
