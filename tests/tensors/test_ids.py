"""Lists of IDs, as torch counts and sorts them."""

import pytest
import torch

from sar.tensors import id_arrays
from sar.tensors.id_arrays import first_of_equals, is_permutation
from sar.tensors.ids import is_sorted, less_first, number_distinct


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(id_arrays.pieces, "__defaults__", (7,))


def some_ids(count, bound=100):
    return torch.randint(bound, (count,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 400])
def test_distinct_nodes_are_numbered_in_order(count, dtype):
    nodes = some_ids(count).to(dtype)
    numbered, counts, places = number_distinct(nodes, 100)
    assert numbered.dtype == counts.dtype == places.dtype == torch.int32
    assert torch.equal(counts.long(), nodes.bincount()[numbered])
    assert numbered.tolist() == sorted(set(nodes.tolist()))
    assert torch.equal(numbered[places.long()].long(), nodes.long())


@pytest.mark.parametrize("count", [0, 1, 2, 400])
def test_distinct_ids(count):
    ids = some_ids(count) - 50
    ascending = ids.sort().values.numpy()
    assert ascending[first_of_equals(ascending)].tolist() == ids.unique().tolist()


@pytest.mark.parametrize("count", [0, 1, 7, 400])
@pytest.mark.parametrize("first", [0, 2**31 + 5, 2**40])
def test_ids_are_shifted(count, first):
    ids = some_ids(count)
    shifted = less_first(ids + first, first)
    assert shifted.dtype == torch.int32
    assert torch.equal(shifted.long(), ids)


def test_order_is_seen():
    keys = torch.arange(30) // 5
    ties = torch.arange(30) % 5
    assert is_sorted(keys, ties)
    assert is_sorted(keys[:0], ties[:0])
    for at in range(29):
        swapped = torch.arange(30)
        swapped[[at, at + 1]] = torch.tensor([at + 1, at])
        assert not is_sorted(keys[swapped], ties[swapped])
        assert is_sorted(keys[swapped], None) == (keys[at] == keys[at + 1])


@pytest.mark.parametrize("order", [torch.arange(20), torch.arange(20).flip(0)])  # which are checked in different ways
def test_permutations(order):
    ids = order + 5
    assert is_permutation(ids.numpy(), 5, 25)
    assert is_permutation(ids[:0].numpy(), 5, 5)
    for wrong in (ids + 1, ids - 1, ids[1:], torch.where(ids == 7, 8, ids), torch.where(ids == 24, 30, ids)):
        assert not is_permutation(wrong.numpy(), 5, 25)
