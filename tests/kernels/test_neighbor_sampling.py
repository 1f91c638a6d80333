"""Neighbor sampling, compiled, against the plain Python that draws from the same random sequences."""

import numpy as np
import pytest
import torch

from sar.kernels import neighbor_sampling
from sar.kernels.neighbor_sampling import ALL, Numbering, copy_rows, draw_in_edges, order_segments


def some_rows(weighted, seed=0):
    random = np.random.default_rng(seed)
    degrees = torch.from_numpy(random.integers(0, 40, 300))
    degrees[::7] = 0
    degrees[5] = 20_000
    weights = torch.from_numpy(random.random(int(degrees.sum())).astype(np.float32)) if weighted else None
    if weights is not None:
        weights[random.random(len(weights)) < 0.3] = 0
        weights[:100] = 0
    rows = torch.from_numpy(random.permutation(300)[:200])
    return rows, rows * 1_000_003, neighbor_sampling.to_offsets(degrees), weights


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fanout", [1, 4, 30, ALL])
def test_draws_are_the_reference_s(monkeypatch, fanout, weighted, replace):
    arguments = (*some_rows(weighted), fanout, replace, 2**64 - 12345)
    offsets, picked = draw_in_edges(*arguments)
    monkeypatch.setattr(neighbor_sampling, "_loops", lambda: None)
    expected_offsets, expected = draw_in_edges(*arguments)
    assert torch.equal(offsets, expected_offsets)
    owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    in_order = [torch.from_numpy(np.lexsort((edges.numpy(), owner.numpy()))) for edges in (picked, expected)]
    assert torch.equal(picked[in_order[0]], expected[in_order[1]])
    assert len(picked) > 100


def test_draws_depend_on_key_and_node_alone():
    rows, nodes, indptr, _ = some_rows(False)
    once = draw_in_edges(rows, nodes, indptr, None, 5, False, 1)
    other = draw_in_edges(rows, nodes, indptr, None, 5, False, 2)
    flipped = draw_in_edges(rows.flip(0), nodes.flip(0), indptr, None, 5, False, 1)
    assert not torch.equal(once[1], other[1])
    pieces = flipped[1].split(flipped[0].diff().tolist())[::-1]
    assert torch.equal(torch.cat(pieces), once[1])


@pytest.mark.parametrize("num_nodes", [500, 2**40])
def test_numbering(monkeypatch, num_nodes):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 400, 600)) * (num_nodes // 500)
    for _ in range(2):
        numbering = Numbering(700, num_nodes)
        assert torch.equal(numbering.add(ids[:50].unique()), torch.arange(len(ids[:50].unique())))
        numbers = numbering.add(ids)
        assert torch.equal(numbering.nodes[numbers], ids)
        assert len(numbering.nodes) == len(ids.unique())
        assert torch.equal(numbering.nodes[: numbers.max() + 1].unique(), ids.unique())
        assert torch.equal(numbering.find(ids), numbers)
        assert numbering.find(torch.tensor([num_nodes - 1])).tolist() == [-1]
        monkeypatch.setattr(neighbor_sampling, "_loops", lambda: None)


def test_segments_and_rows(monkeypatch):
    counts = torch.tensor([2, 0, 3, 1])
    for _ in range(2):
        indptr, order = order_segments(torch.tensor([3, 2, 1, 0]), counts)
        assert indptr.tolist() == [0, 1, 4, 4, 6]
        assert order.tolist() == [5, 2, 3, 4, 0, 1]
        for dtype, width in [(torch.float32, 3), (torch.float64, 2), (torch.bool, 3), (torch.bfloat16, 5)]:
            table = (torch.arange(5 * width).view(5, width) % 3).to(dtype)
            out = torch.zeros(7, width, dtype=dtype)
            copy_rows(table, torch.tensor([4, 0]), out, torch.tensor([6, 1]))
            copy_rows(table, None, out[:5] if width > 9 else out, torch.tensor([0, 2, 3, 4, 5]))
            expected = torch.zeros_like(out)
            expected[[6, 1]] = table[[4, 0]]
            expected[[0, 2, 3, 4, 5]] = table
            assert torch.equal(out, expected)
        monkeypatch.setattr(neighbor_sampling, "_loops", lambda: None)
