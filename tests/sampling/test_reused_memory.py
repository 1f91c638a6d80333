"""Memory of features is used again, but never while somebody holds a tensor in it."""

import pytest
import torch

from sar.sampling import batch_memory


@pytest.fixture(autouse=True)
def own_blocks(monkeypatch):
    monkeypatch.setattr(batch_memory, "_free", [])


def test_block_comes_back_with_the_last_view():
    first = batch_memory.empty((1000, 300), torch.float64)
    address, row = first.data_ptr(), first[7]
    assert first.is_contiguous()
    del first
    second = batch_memory.empty((1000, 300), torch.float64)
    assert second.data_ptr() != address
    del row
    third = batch_memory.empty((4000, 140), torch.float32)
    assert third.data_ptr() == address
    assert third.shape == (4000, 140)


def test_autograd_holds_on_to_a_block():
    x = batch_memory.empty((1000, 300), torch.float32).fill_(2.0)
    weight = torch.ones(300, requires_grad=True)
    total = (x * weight).sum()
    del x
    assert batch_memory._free == []
    batch_memory.empty((1000, 300), torch.float32).fill_(5.0)
    total.backward()
    assert torch.equal(weight.grad, torch.full((300,), 2000.0))
    del total
    assert len(batch_memory._free) == 2


def test_few_blocks_are_kept():
    tensors = [batch_memory.empty((size, 2**20), torch.uint8) for size in range(1, 9)]
    del tensors
    assert len(batch_memory._free) == batch_memory.KEPT
    assert min(block.nbytes for block in batch_memory._free) >= 5 * 2**20


def test_small_tensors_and_no_rows():
    assert batch_memory.empty((3, 2), torch.int64).shape == (3, 2)
    assert batch_memory.empty((0, 2), torch.bfloat16).shape == (0, 2)
    assert batch_memory._free == []
