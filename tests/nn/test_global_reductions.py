"""Means and maxima over all workers: in half precisions, where counts are larger than their numbers; special values."""

import pytest
import torch

import sar
from sar.nn.statistics import global_max, global_mean

ROWS = 70_000
"""More than the greatest number of float16, and than bfloat16 counts one by one."""


def reduce(dtype):
    x = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(sar.rank())).round().to(dtype).requires_grad_()
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
        torch.testing.assert_close(grad.double(), expected[rank * ROWS :][:ROWS], rtol=2**-6, atol=1e-6)


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
