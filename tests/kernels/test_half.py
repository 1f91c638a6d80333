"""Half precisions in the compiled kernels: every number there is, how results round, and processors without float16."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sar.kernels import EdgeBlock, EdgeOperand, Target, aggregate_sum, api, edge_apply
from sar.kernels import torch as torch_kernels
from tests.kernels import oracle

HALVES = (torch.bfloat16, torch.float16)
U, V, E = Target.U, Target.V, Target.E
ODD = (0.0, -0.0, 1e-30, -1e-30, 6e-8, 1e-5, 1.0, -3.0, 1e4, 65504.0, 1e30, torch.inf, -torch.inf, torch.nan)


def one_by_one(count: int) -> EdgeBlock:
    """Edge i leads from node i to node i."""
    return EdgeBlock.from_coo(torch.arange(count), torch.arange(count), count, count)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_is_read_and_written(dtype):
    x = torch.arange(2**16).to(torch.uint16).view(dtype).view(-1, 16)  # in rows that are made vectors of
    block, copied, out = one_by_one(len(x)), torch.empty_like(x), torch.zeros(x.shape)
    edge_apply(block, oracle.message("copy_lhs", x, U), copied)
    number = ~x.isnan()
    assert torch.equal(copied.view(torch.int16)[number], x.view(torch.int16)[number])  # subnormals, -0.0, infinities
    assert copied.isnan().equal(~number)
    aggregate_sum(block, oracle.message("copy_lhs", x, U), out)
    torch.testing.assert_close(out, x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_is_to_nearest_and_ties_to_even(dtype):
    """Numbers of any size, beside all bits that could matter; the greatest ones round to infinity."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=random)
    ties = bits[: 2**15].bitwise_and(~0x1FFF) + torch.tensor([0, 0x1000, 0x1001, 0xFFF]).repeat(2**13)
    bf_ties = bits[2**15 :].bitwise_and(~0xFFFF) + torch.tensor([0x8000, 0x8001, 0x7FFF, 0]).repeat(2**13)
    named = torch.tensor([65519.0, 65520.0, -7e4, 3.4e38, 2.0**-25, 2.0**-24, 6e-8, -0.0]).view(torch.int32)
    x = torch.cat([bits.int(), ties.int(), bf_ties.int(), named]).view(torch.float32).view(-1, 8)
    out = torch.empty(x.shape, dtype=dtype)
    edge_apply(one_by_one(len(x)), oracle.message("copy_lhs", x, U), out)
    expected = x.to(dtype)
    number = ~x.isnan()
    assert torch.equal(out.view(torch.int16)[number], expected.view(torch.int16)[number])
    assert out.isnan().equal(~number)


def rows(random, count, width, numbers, dtype):
    return torch.tensor(numbers)[torch.randint(len(numbers), (count, width), generator=random)].to(dtype)


def check(kernel, shape, of_all, of_sizes):
    """A sum in float32 is that of plain torch in float64 but for float32's round-off of each of its terms."""
    out, exact, size = (torch.zeros(shape, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float64))
    getattr(api, kernel)(*of_all, out)
    rest = (None,) if kernel == "aggregate_grad" else ()  # no maximum
    for total, operands in ((exact, of_all), (size, of_sizes)):
        getattr(torch_kernels, kernel)(*operands, total, *rest)
    finite = size.isfinite()
    assert ((out - exact).abs() <= 30 * torch.finfo(torch.float32).eps * size)[finite].all()
    torch.testing.assert_close(out.double()[~finite], exact[~finite], equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@settings(max_examples=2 * settings.default.max_examples)
@given(graph=oracle.graphs(), seed=st.integers(0, 2**20), width=st.sampled_from((1, 5, 40)))
def test_odd_numbers(dtype, graph, seed, width):
    """Sums, products, maxima and gradients of zeros, subnormals, infinities and NaN."""
    random = torch.Generator().manual_seed(seed)
    x, grad = (rows(random, count, width, ODD, dtype) for count in (graph.num_src, graph.num_dst))
    w = rows(random, graph.num_edge_rows, 1, (1.0, -2.0, 0.5), dtype)
    assume(graph.src)
    for of_all, of_sizes in (
        (oracle.message("copy_lhs", x, U), oracle.message("copy_lhs", x.abs(), U)),
        (oracle.message("mul", x, U, w, E), oracle.message("mul", x.abs(), U, w.abs(), E)),
    ):
        check("aggregate_sum", (graph.num_dst, width), (graph.block, of_all), (graph.block, of_sizes))
        all_and_sizes = (
            (graph.block, message, "lhs", EdgeOperand.of(values, V))
            for message, values in ((of_all, grad), (of_sizes, grad.abs()))
        )
        check("aggregate_grad", x.shape, *all_and_sizes)
        made = []
        for backend in (api, torch_kernels):
            best = torch.full((graph.num_dst, width), -torch.inf)
            arg = torch.full(best.shape, -1, dtype=torch.int32)
            backend.aggregate_cmp(graph.block, of_all, best, arg, True)
            made.append((best, arg))
        assert torch.equal(made[0][0], made[1][0])
        assert torch.equal(made[0][1], made[1][1])


WITHOUT = """
import torch
from sar.kernels import EdgeBlock, EdgeMessage, EdgeOperand, Op, Target, aggregate_sum, api

x = torch.tensor([[1.5], [-0.25]])
block = EdgeBlock.from_coo(torch.tensor([0, 1]), torch.tensor([0, 0]), 2, 1)
for dtype in (torch.bfloat16, torch.float16):
    out = torch.zeros(1, 1)
    aggregate_sum(block, EdgeMessage(Op.COPY, EdgeOperand.of(x.to(dtype), Target.U)), out)
    print(out.item(), api.choose(x.to(dtype)).__name__)
"""


def test_a_processor_that_does_not_convert_float16_takes_plain_torch():
    """Where code calls the function in place of the instruction, LLVM ends the process."""
    environment = os.environ | {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}  # read by a new process only
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["1.25", "sar.kernels.cpu.kernels", "1.25", "sar.kernels.torch"], done.stderr
