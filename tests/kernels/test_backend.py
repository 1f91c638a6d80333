"""Which backend serves which tensors."""

import logging

import pytest
import torch

import sar.kernels.cpu as cpu_kernels
import sar.kernels.meta as meta_kernels
import sar.kernels.torch as torch_kernels
from sar.kernels import EdgeOperand, Target, aggregate_grad, aggregate_sum, backend
from tests.kernels import oracle

FUNCTIONS = {name for name in vars(backend.Backend) if not name.startswith("_")}


@pytest.mark.parametrize("module", [cpu_kernels, torch_kernels, meta_kernels])
def test_a_backend_has_all_functions(module):
    assert len(FUNCTIONS) == 10
    assert all(callable(getattr(module, name)) for name in FUNCTIONS)


def test_choice():
    single, double, half = (torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float16))
    assert backend.choose(single, None, single) is cpu_kernels
    assert backend.choose(double) is cpu_kernels
    assert backend.choose(single, double) is torch_kernels
    assert backend.choose(half) is torch_kernels
    assert backend.choose(single[:0]) is torch_kernels
    assert backend.choose(single.to("meta"), single) is meta_kernels


def test_the_slow_path_on_the_cpu_is_logged_once(caplog):
    backend._say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, "sar"):
        for _ in range(2):
            backend.choose(torch.ones(2, dtype=torch.bfloat16))
            backend.choose(torch.ones(2))
    [record] = caplog.records
    assert "torch.bfloat16" in record.getMessage()
    assert "float32" in record.getMessage()


def test_tensors_without_values():
    """Shapes are checked, nothing is computed, and what other backends keep is counted."""
    block = oracle.make_graph([(0, 0), (1, 0)], 2, 1).block.to("meta")
    x, out = torch.ones(2, 3, device="meta"), torch.ones(1, 3, device="meta")
    message = oracle.message("copy_lhs", x, Target.U)
    aggregate_sum(block, message, out)
    before = block.nbytes
    aggregate_grad(block, message, "lhs", EdgeOperand.of(out, Target.V), x)
    assert block.nbytes - before == 4 * (2 + 1) + 4 * 2  # edges by source: offsets and destinations
