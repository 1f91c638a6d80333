"""`DistributedBN1D` against `torch.nn.BatchNorm1d` on all rows together; means and maxima over all workers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sar
from sar.comm.session import current_group
from sar.errors import ConfigError
from sar.nn.statistics import global_max, global_mean
from tests.core.attempts import catch_and_recover
from tests.matrix import corner
from tests.parity.harness import assert_close, merge, weighted_sum

ROWS = {1: [9], 2: [6, 3], 3: [0, 5, 4], 4: [1, 0, 7, 1], 5: [1, 0, 5, 1, 2], 8: [1, 0, 2, 1, 2, 1, 1, 1]}
OPTIONS = [
    {},
    {"affine": False},
    {"momentum": None},
    {"momentum": 0.3, "eps": 0.1},
    {"track_running_stats": False},
    {"momentum": None, "affine": False},
]


def normalise(batches, options, dtype):
    """Three training steps, an evaluation and one more step; everything that torch's module would have too."""
    torch.manual_seed(3)
    if dist.is_initialized():
        norm = sar.DistributedBN1D(4, **options).to(dtype)
    else:
        norm = nn.BatchNorm1d(4, **options).to(dtype)
    if norm.affine:
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.bias)
    results = {}
    for step, (rows, cotangent) in enumerate(batches):
        norm.train(step != 3)
        x = rows.clone().requires_grad_()
        out = norm(x)
        norm.zero_grad()
        weighted_sum(out, cotangent).backward()
        results |= {f"node {step}": out.detach(), f"node {step} x.grad": x.grad}
        results |= {f"sum {step} {name}.grad": value.grad.clone() for name, value in norm.named_parameters()}
        results |= {f"same {step} {name}": value.clone() for name, value in norm.named_buffers()}
    return results


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, corner(4)])
def test_batch_norm(pool, world_size, dtype, options):
    """The rows are far from 0, where E[x^2] - E[x]^2 would lose all digits in float32."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(9, 4, generator=generator, dtype=torch.float64).add(300).to(dtype),
            torch.randn(9, 4, generator=generator, dtype=torch.float64).to(dtype),
        )
        for _ in range(5)
    ]
    expected = normalise(batches, options, dtype)
    mine = [
        [(x.split(ROWS[world_size])[rank], c.split(ROWS[world_size])[rank]) for x, c in batches]
        for rank in range(world_size)
    ]
    actual = merge(pool.run(normalise, options, dtype, per_rank=mine))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value.dtype == torch.int64:
            assert torch.equal(actual[name], value), name
        else:
            assert_close(actual[name], value, tolerance=1e-4 if dtype == torch.float32 else 1e-9, least_scale=1)


def single_row(rows, options, training):
    norm = sar.DistributedBN1D(4, **options).train(training)
    failure = catch_and_recover(norm, rows)
    return failure, sar.DistributedBN1D(4)(torch.ones(2, 4)).shape


@pytest.mark.parametrize(
    "options, training", [({}, True), ({"track_running_stats": False}, True), ({"track_running_stats": False}, False)]
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_row_on_all_workers_together_is_refused(pool, world_size, options, training):
    """Where statistics of the batch are used, as torch does."""
    torch_norm = nn.BatchNorm1d(4, **options).train(training)
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        torch_norm(torch.ones(1, 4))
    rows = [torch.ones(1 if rank == world_size - 1 else 0, 4) for rank in range(world_size)]
    for failure, shape in pool.run(single_row, options, training, per_rank=rows):
        assert failure is not None
        assert "SarError" in failure.bases
        assert "more than one" in failure.message
        assert shape == (2, 4), "works on"


def gradient_on_one_rank(rows, chosen):
    norm = sar.DistributedBN1D(4, affine=False)
    x = rows.clone().requires_grad_(sar.rank() == chosen)
    norm(x).pow(3).sum().backward()
    return x.grad


@pytest.mark.parametrize("world_size", [2])
def test_a_gradient_wanted_on_one_rank_only(pool):
    whole = torch.randn(9, 4, generator=torch.Generator().manual_seed(5)).requires_grad_()
    nn.BatchNorm1d(4, affine=False)(whole).pow(3).sum().backward()
    results = pool.run(gradient_on_one_rank, 1, per_rank=list(whole.detach().split([6, 3])))
    assert results[0] is None
    assert_close(results[1], whole.grad[6:])


def averaged(batches):
    """Running statistics made anew for averaged weights, and then with layers frozen as Lightning and as loops do."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4, momentum=0.3)).double()
    model = torch.optim.swa_utils.AveragedModel(sar.convert_batchnorm(model) if dist.is_initialized() else model)
    torch.optim.swa_utils.update_bn(batches, model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    norms[0].track_running_stats = False
    norms[1].eval()
    model(batches[0])
    results = {f"same {name}": value.double() for name, value in model.named_buffers()}
    calls = current_group().call_id if dist.is_initialized() else 0
    out = norms[1](batches[1]).detach()
    assert not calls or current_group().call_id == calls, "a frozen layer makes no call"
    return results | {"node out": out}


@pytest.mark.parametrize("world_size", [2])
def test_torch_finds_batch_norms(pool, world_size):
    """As `isinstance(module, ...)` does in torch and in training scripts."""
    batches = torch.randn(3, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 3
    expected = averaged(list(batches))
    actual = merge(pool.run(averaged, per_rank=[[x.split([6, 3])[rank] for x in batches] for rank in range(2)]))
    for name, value in expected.items():
        assert_close(actual[name], value)
    norm = sar.DistributedBN1D(3)
    assert sar.convert_batchnorm(norm) is norm


def test_convert_batchnorm_keeps_parameters_statistics_settings_and_hooks():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, eps=1e-3, momentum=None)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.ModuleDict({"inner": nn.BatchNorm1d(4, affine=False)}), norm)
    norm.weight.requires_grad_(False)
    norm(torch.randn(7, 4))
    model.eval()
    handle = norm.register_forward_hook(lambda module, args, out: out * 2)
    state, parameters, x = model.state_dict(), list(model.parameters()), torch.randn(5, 4)
    before = norm(x), model[2]["inner"](x)
    assert sar.convert_batchnorm(model) is model
    norms = [model[1], model[2]["inner"], model[3]]
    assert all(type(each) is sar.DistributedBN1D and not each.training for each in norms)
    assert model[1] is model[3], "one module in two places stays one"
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert (model[1].eps, model[1].momentum) == (1e-3, None)
    assert torch.equal(model[1](x), before[0])
    assert torch.equal(model[2]["inner"](x), before[1])
    handle.remove()
    assert torch.equal(model[1](x), before[0] / 2)
    assert type(sar.convert_batchnorm(nn.BatchNorm1d(3))) is sar.DistributedBN1D


def test_convert_batchnorm_refuses_other_dimensions():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm2d(4))
    with pytest.raises(ConfigError, match="found 1 BatchNorm2d; expected BatchNorm1d"):
        sar.convert_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d, "nothing is changed"


# -- means and maxima

MANY = 70_000
"""More than the greatest number of float16, and than bfloat16 counts one by one."""


def reduce(dtype):
    x = torch.rand(MANY, 2, generator=torch.Generator().manual_seed(sar.rank())).round().to(dtype).requires_grad_()
    mean, greatest = global_mean(x), global_max(x)
    (64 * mean + 64 * greatest).sum().backward()
    return x.detach().double(), x.grad, mean.detach(), greatest.detach()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precisions(pool, world_size, dtype):
    found = pool.run(reduce, dtype)
    x = torch.cat([own for own, *_ in found])
    expected = 64 * world_size * (1 / len(x) + (x == 1).double() / (x == 1).sum(0))
    for rank, (_, grad, mean, greatest) in enumerate(found):
        assert mean.dtype == greatest.dtype == grad.dtype == dtype
        assert torch.equal(mean, x.mean(0).to(dtype))
        assert greatest.eq(1).all()
        torch.testing.assert_close(grad.double(), expected[rank * MANY :][:MANY], rtol=2**-6, atol=1e-6)


def greatest(x):
    x = x.clone().requires_grad_()
    found = global_max(x)
    (found * torch.arange(1.0, 9.0)).sum().backward()
    return found.detach(), x.grad


@pytest.mark.parametrize("world_size", [1, 2])
def test_maxima_of_special_values(pool, world_size):
    """As `torch.amax` has them and their gradients, on any worker."""
    inf, nan = torch.inf, torch.nan
    columns = [1, 2, 2], [inf, inf, 0], [nan, 1, -inf], [-inf] * 3, [-inf, 1, 2], [0, 0, -1], [inf, nan, 1], [nan] * 3
    for order in ([0, 1, 2], [2, 1, 0]):
        x = torch.tensor(columns).T[order]
        whole = x.clone().requires_grad_()
        whole.amax(0).mul(torch.arange(1.0, 9.0)).sum().mul(world_size).backward()
        found = pool.run(greatest, per_rank=x.tensor_split(world_size))
        for result, _ in found:
            torch.testing.assert_close(result, x.amax(0), equal_nan=True)
        torch.testing.assert_close(torch.cat([grad for _, grad in found]), whole.grad, equal_nan=True)
    result, _ = pool.run(greatest, x[:0])[0]
    assert result.tolist() == [-inf] * 8
