"""Means and maxima over all workers in half precisions, where counts are larger than their numbers."""

import pytest
import torch

import sar
from sar.nn.global_reductions import global_max, global_mean

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
