"""Which backend serves which tensors."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sar.kernels.cpu.kernels as cpu_kernels
import sar.kernels.meta as meta_kernels
import sar.kernels.torch as torch_kernels
from sar.errors import GraphError
from sar.kernels import EdgeOperand, Target, aggregate_grad, aggregate_sum, api
from sar.kernels.ops import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score
from tests.kernels import oracle


def test_choice():
    single, double, half = (torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float16))
    assert api.choose(single, None, single) is cpu_kernels
    assert api.choose(double) is cpu_kernels
    assert api.choose(single, double) is torch_kernels
    assert api.choose(half, single, half.bfloat16()) is cpu_kernels
    assert api.choose(half, double) is torch_kernels
    assert api.choose(torch.ones(2, dtype=torch.int64)) is torch_kernels
    assert api.choose(single[:0]) is torch_kernels
    assert api.choose(single.to("meta"), single) is meta_kernels


def test_plain_torch_serves_cuda_and_a_warning_says_once_that_nobody_tried(caplog):
    api._choose.cache_clear()
    api._warn_of_cuda.cache_clear()
    with caplog.at_level(logging.WARNING, "sar"), FakeTensorMode():
        x, rows = torch.ones(2, device="cuda"), torch.ones(2, dtype=torch.int32, device="cuda")
        for operands in ((x, None, x.half()), (x, x.bfloat16(), x.double()), (rows,)):
            assert api.choose(*operands) is torch_kernels
    [record] = caplog.records
    assert "check_model" in record.getMessage()


def test_the_slow_path_on_the_cpu_is_logged_once(caplog):
    api._choose.cache_clear()
    with caplog.at_level(logging.WARNING, "sar"):
        for _ in range(2):
            api.choose(torch.ones(2, dtype=torch.int64))
            api.choose(torch.ones(2, dtype=torch.float16))
    [record] = caplog.records
    assert "torch.int64" in record.getMessage()
    assert "float32" in record.getMessage()


@pytest.mark.parametrize("has_instructions", [False, True])
def test_a_processor_without_instructions_for_bfloat16_is_logged_once(caplog, monkeypatch, has_instructions):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    api._choose.cache_clear()
    api._warn_of_bfloat16.cache_clear()
    single, half = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "sar"):
        api.choose(single)
        assert not caplog.records
        api.choose(half)
        api.choose(half, single)
    assert ["bfloat16" in record.getMessage() for record in caplog.records] == [True] * (not has_instructions)


def test_tensors_without_values():
    """Shapes are checked, nothing is computed, and what other backends keep is counted."""
    block = oracle.make_graph([(0, 0), (1, 0)], 2, 1).block.to("meta")
    x, out = torch.ones(2, 3, device="meta"), torch.ones(1, 3, device="meta")
    message = oracle.message("copy_lhs", x, Target.U)
    aggregate_sum(block, message, out)
    before = block.nbytes
    aggregate_grad(block, message, "lhs", EdgeOperand.of(out, Target.V), x)
    assert block.nbytes - before == 4 * (2 + 1) + 4 * 2  # edges by source: offsets and destinations


def test_edge_ids_without_values():
    """A block with edge IDs on "meta" takes edge operands that have a row for each of its edges."""
    block = oracle.make_graph([(0, 0), (1, 0), (0, 0)], 2, 1, ids=[5, 2, 7]).block
    assert block.edge_bound == 8
    meta, out = block.to("meta"), torch.ones(1, 3, device="meta")
    assert meta.edge_bound == 3
    aggregate_sum(meta, oracle.message("copy_lhs", torch.ones(3, 3, device="meta"), Target.E), out)
    with pytest.raises(GraphError, match="expected"):
        aggregate_sum(meta, oracle.message("copy_lhs", torch.ones(2, 3, device="meta"), Target.E), out)


def test_plain_torch_never_waits_for_the_device(monkeypatch):
    """Reading a value, or a size that depends on values, would stall a GPU; tensors without values refuse both."""
    monkeypatch.setattr(torch_kernels, "PRODUCT_DEVICES", ())  # fake tensors have no sparse products
    real = oracle.make_graph([(0, 0), (1, 0), (1, 2)], 2, 3).block
    with FakeTensorMode(allow_non_fake_inputs=True):
        block, x, w = real.to("cpu"), torch.ones(2, 4), torch.ones(3, 1)
        out, grad, arg = torch.zeros(3, 4), torch.zeros(2, 4), torch.full((3, 4), -1)
        message = oracle.message("mul", x, Target.U, w, Target.E)
        torch_kernels.aggregate_sum(block, message, out)
        for largest in (True, False):
            torch_kernels.aggregate_cmp(block, message, out, arg, largest)
        torch_kernels.edge_apply(block, message, torch.zeros(3, 4))
        for given in (None, arg):
            torch_kernels.aggregate_grad(block, message, "lhs", EdgeOperand.of(out, Target.V), grad, given)
        torch_kernels.add_rows(torch.arange(2), x, grad)
        x, y, attn = torch.ones(2, 1, 4), torch.ones(3, 1, 4), torch.ones(1, 4)
        for score in (Score.DYNAMIC, Score.DOT):
            how = Attention(score, 0.2, 0.5, 3)
            ends = AttentionOperands(x, y, attn if score is Score.DYNAMIC else None, w[:, 0])
            torch_kernels.attend(block, how, ends, OnlineSoftmaxState.start(3, x))
            grads = Gradients(x.clone(), y.clone(), attn.clone(), w[:, 0].clone())
            torch_kernels.attend_grad(block, how, ends, y, torch.ones(3, 4, 1), grads)
