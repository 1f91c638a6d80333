"""Long lists of IDs in pieces: the results do not show where a piece ends."""

import pytest
import torch

from sar.tensors import ids
from sar.tensors.ids import count_ids, distinct, is_sorted, less_first, number_distinct


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(ids.pieces, "__defaults__", (7,))


def some_ids(count, bound=100):
    return torch.randint(bound, (count,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 400])
def test_distinct_nodes_are_numbered_in_order(count, dtype):
    nodes = some_ids(count).to(dtype)
    numbered, places = number_distinct(nodes, 100)
    assert numbered.dtype == places.dtype == torch.int32
    assert numbered.tolist() == sorted(set(nodes.tolist()))
    assert torch.equal(numbered[places.long()].long(), nodes.long())


@pytest.mark.parametrize("count", [0, 1, 2, 400])
def test_distinct_ids(count):
    ids = some_ids(count) - 50
    assert torch.equal(distinct(ids), ids.unique())


@pytest.mark.parametrize("count", [0, 1, 7, 400])
def test_ids_are_counted_and_shifted(count):
    ids = some_ids(count)
    assert torch.equal(count_ids(ids.int(), 100), torch.bincount(ids, minlength=100))
    shifted = less_first(ids + 2**40, 2**40)
    assert shifted.dtype == torch.int32
    assert torch.equal(shifted.long(), ids)


def test_order_is_seen_across_pieces():
    keys = torch.arange(30) // 5
    ties = torch.arange(30) % 5
    assert is_sorted(keys, ties)
    assert is_sorted(keys[:0], ties[:0])
    for at in range(29):  # 6 to 7 is where the first piece ends
        swapped = torch.arange(30)
        swapped[[at, at + 1]] = torch.tensor([at + 1, at])
        assert not is_sorted(keys[swapped], ties[swapped])
        assert is_sorted(keys[swapped], None) == (keys[at] == keys[at + 1])
