"""What the Numba kernels promise beyond their results: threads, large blocks, one compilation for all shapes."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sar.kernels import (
    EdgeBlock,
    EdgeMessage,
    EdgeOperand,
    Op,
    Target,
    aggregate_cmp,
    aggregate_grad,
    aggregate_sum,
    api,
    edge_apply,
    threads,
)
from sar.kernels import torch as torch_kernels
from sar.kernels.cpu import aggregate_loops as loops
from tests.kernels import oracle

U, V, E = Target.U, Target.V, Target.E


def power_law_block(num_nodes: int = 500, num_edges: int = 20_000) -> EdgeBlock:
    """A block with hubs, of more edges than are handled one by one."""
    random = torch.Generator().manual_seed(0)
    src, dst = (num_nodes * torch.rand(2, num_edges, generator=random) ** 3).long()
    dst, order = dst.sort(stable=True)
    return EdgeBlock.from_coo(src[order], dst, num_nodes, num_nodes)


def everything(block: EdgeBlock) -> list[Tensor]:
    """Results of each kernel, on features that take its different inner loops."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(block.num_src, 4, 17, generator=random)
    w = torch.rand(block.num_edges, 4, 1, generator=random)
    total, best, scores = torch.zeros_like(x), torch.full_like(x, -torch.inf), torch.empty_like(w)
    arg = torch.full(x.shape, -1, dtype=torch.int32)
    grad_x, grad_w, grad_best = torch.zeros_like(x), torch.zeros_like(w), torch.zeros_like(x)
    product, grad = oracle.message("mul", x, U, w, E), EdgeOperand.of(x, V)
    aggregate_sum(block, product, total)
    aggregate_cmp(block, product, best, arg, True)
    edge_apply(block, oracle.message("dot", x, U, x, V), scores)
    aggregate_grad(block, product, "lhs", grad, grad_x)
    aggregate_grad(block, product, "rhs", grad, grad_w)
    aggregate_grad(block, product, "lhs", grad, grad_best, arg=arg)
    return [total, best, arg, scores, grad_x, grad_w, grad_best]


def test_large_block_as_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    block = power_law_block()
    fast = everything(block)
    monkeypatch.setattr(api, "COMPILED_DTYPES", ())
    monkeypatch.setattr(api, "_choose", api._choose.__wrapped__)  # neither finds nor leaves a kept choice
    monkeypatch.setattr(torch_kernels, "CHUNK_ELEMENTS", 100_000)  # several chunks, which cut rows apart
    for a, b in zip(fast, everything(block), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_equal_bits_on_any_number_of_threads() -> None:
    block, before, results = power_law_block(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(everything(block))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("count", (1, 2, 3, 8))
def test_ranges_cover_all_groups_and_are_balanced(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    edges = np.random.default_rng(0).integers(0, 20, 1000)
    indptr = np.concatenate([[0], np.cumsum(edges)])
    ranges, all_at_once = [], threading.Barrier(count, timeout=60)

    def kernel(begin: int, end: int, argument: str) -> None:
        assert argument == "passed on"
        ranges.append((begin, end))
        all_at_once.wait()

    threads.run_balanced(kernel, indptr, 1000, "passed on", private=list)
    ranges.sort()
    assert len(ranges) == count
    assert [0, *(end for _, end in ranges)] == [*(begin for begin, _ in ranges), 1000]
    assert all(abs(indptr[end] - indptr[begin] - indptr[-1] / count) <= 40 for begin, end in ranges)


def test_errors_of_any_thread_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def kernel(begin: int, end: int) -> None:
        if begin > 0:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        threads.run_balanced(kernel, np.arange(0, 10**6, 1000), 1000)


SCRIPT = """
import os, signal, numpy as np, torch
from sar.kernels import threads

torch.set_num_threads(3)
signal.alarm(60)

def total():
    parts = []
    threads.run_balanced(lambda begin, end: parts.append(end - begin), np.arange(0, 10**6, 1000), 1000, private=list)
    return sum(parts), len(parts)

print(*total())
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if total()[0] == 999 else 1)
print(os.waitpid(child, 0)[1])
"""


def test_threads_work_after_a_fork_and_do_not_keep_the_process() -> None:
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (process.stdout.split(), process.returncode) == (["999", "3", "0"], 0), process.stderr


def use_kernels(dtype: torch.dtype, heads: int) -> list[int]:
    """Run every kind of kernel on a shard and a tile; how many versions of each kernel there are now."""
    block = power_law_block(20, 50)
    x, w = torch.ones(20, heads, 3, dtype=dtype), torch.ones(50, heads, 1, dtype=dtype)
    arg = torch.full(x.shape, -1, dtype=torch.int32)
    for tile, rows in ((block, slice(0, 20)), (block.select_sources(5, 15), slice(5, 15))):
        aggregate_sum(tile, oracle.message("copy_lhs", x[rows], U), x.clone())
        aggregate_cmp(tile, oracle.message("add", x[rows], U, w, E), x.clone(), arg, False)
        edge_apply(tile, oracle.message("dot", x[rows], U, x, V), w.clone())
        for target, out in ((U, x[rows].clone()), (V, x.clone())):
            message = EdgeMessage(Op.MUL, EdgeOperand(None, target, (heads, 3)), EdgeOperand.of(w, E))
            for edge_ids in (None, arg):
                aggregate_grad(tile, message, "lhs", EdgeOperand.of(x, V), out, arg=edge_ids)
    kernels = (loops.accumulate, loops.accumulate_rows, loops.compare, loops.assign, loops.accumulate_where)
    return [len(kernel.signatures) for kernel in kernels]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_kernels_are_compiled_once_for_all_shapes(dtype: torch.dtype) -> None:
    assert use_kernels(dtype, heads=2) == use_kernels(dtype, heads=5)
