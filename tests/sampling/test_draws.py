"""Neighbor sampling, compiled, against the plain Python that draws from the same sequences; requests to owners."""

import numpy as np
import pytest
import torch

from sar.comm.rows import FieldFormat
from sar.sampling.draws import ALL, MOST_WEIGHT, Numbering, copy_rows, draw_in_edges
from sar.sampling.owner_requests import NodesByOwner, Rows, pack, unpack
from sar.tensors.ids import to_offsets
from tests.sampling import draws_oracle


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
    return rows, rows * 1_000_003, to_offsets(degrees), weights


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fanout", [1, 4, 30, ALL])
def test_draws_are_the_reference_s(fanout, weighted, replace):
    *graph, weights = some_rows(weighted)
    key = 2**64 - 12345
    offsets, picked = draw_in_edges(*graph, weights, fanout, replace, key)
    arrays = [tensor.numpy() for tensor in graph]
    weights = np.empty(0) if weights is None else weights.numpy()
    found = draws_oracle.draw_edges(*arrays, weights, fanout, replace and fanout != ALL, key)
    expected_offsets, expected = (torch.from_numpy(array) for array in found)
    assert torch.equal(offsets, expected_offsets)
    owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    in_order = [torch.from_numpy(np.lexsort((edges.numpy(), owner.numpy()))) for edges in (picked, expected)]
    assert torch.equal(picked[in_order[0]], expected[in_order[1]])
    assert len(picked) > 100


LEAST = np.nextafter(0, 1)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [1, 4, ALL])
@pytest.mark.parametrize(
    "dtype, weights",
    [
        (torch.float64, [0, LEAST, 3 * LEAST, 2 * LEAST, 0]),
        (torch.float64, [1e-310, 0, 2e-310, 3e-310, 1e-310]),
        (torch.float64, [1, 1e-310, 0, 2e-310, LEAST]),
        (torch.float64, [MOST_WEIGHT, MOST_WEIGHT, 1, 0, 1e-310]),
        (torch.float32, [1e-45, 3e-45, 0, 0, 1e-45]),
        (torch.float32, [3e38, 3e38, 3e38, 0, 1e-45]),
    ],
)
def test_draws_by_odd_weights(dtype, weights, fanout, replace):
    """Each node has the same five in-edges, and draws are the reference's, which has numbers of a wider range."""
    rows = torch.arange(500)
    weights = torch.tensor(weights, dtype=dtype).repeat(len(rows))
    graph = rows, 7 * rows, to_offsets(torch.full_like(rows, 5))
    offsets, picked = draw_in_edges(*graph, weights, fanout, replace, 3)
    arrays = [tensor.numpy() for tensor in (*graph, weights)]
    found = draws_oracle.draw_edges(*arrays, fanout, replace and fanout != ALL, 3)
    assert offsets.tolist() == found[0].tolist()
    owner = np.repeat(rows.numpy(), offsets.diff().numpy())
    assert np.array_equal(*(edges[np.lexsort((edges, owner))] for edges in (picked.numpy(), found[1])))
    assert np.array_equal(picked.numpy() // 5, owner)
    assert bool((weights[picked] > 0).all())


def test_draws_depend_on_key_and_node_alone():
    rows, nodes, indptr, _ = some_rows(False)
    once = draw_in_edges(rows, nodes, indptr, None, 5, False, 1)
    other = draw_in_edges(rows, nodes, indptr, None, 5, False, 2)
    flipped = draw_in_edges(rows.flip(0), nodes.flip(0), indptr, None, 5, False, 1)
    assert not torch.equal(once[1], other[1])
    pieces = flipped[1].split(flipped[0].diff().tolist())[::-1]
    assert torch.equal(torch.cat(pieces), once[1])


@pytest.mark.parametrize("num_nodes", [500, 2**40])
def test_numbering(num_nodes):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 400, 600)) * (num_nodes // 500)
    numbering, known = Numbering(700, num_nodes), {}
    for given in (ids[:50].unique(), ids):
        numbers = numbering.add(given)
        assert numbers.tolist() == draws_oracle.number_nodes(given.numpy(), known).tolist()
    assert torch.equal(numbering.nodes[numbers], ids)
    assert numbering.nodes.tolist() == list(known)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 3), (torch.float64, 2), (torch.bool, 3), (torch.bfloat16, 5)]
)
def test_rows(dtype, width):
    table = (torch.arange(5 * width).view(5, width) % 3).to(dtype)
    out = torch.zeros(7, width, dtype=dtype)
    copy_rows(table, torch.tensor([4, 0]), out, torch.tensor([6, 1]))
    copy_rows(table, None, out, torch.tensor([0, 2, 3, 4, 5]))
    expected = torch.zeros_like(out)
    expected[[6, 1]] = table[[4, 0]]
    expected[[0, 2, 3, 4, 5]] = table
    assert torch.equal(out, expected)


def test_columns_come_out_of_a_message_as_they_went_in():
    columns = [
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.empty(0, 2, dtype=torch.bfloat16),
        torch.randn(3, 2, 2),
        torch.arange(7, dtype=torch.uint8),
        torch.empty(4, 0),
    ]
    table = torch.arange(24, dtype=torch.float32).view(8, 3)
    message = pack([*columns, Rows(table, torch.tensor([5, 0, 5]))])
    columns.append(table[[5, 0, 5]])
    assert int(message[:8].view(torch.int64)) == len(message)
    found = unpack(message, [FieldFormat.of(column) for column in columns])
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, columns, strict=True))
    assert unpack(pack([]), []) == []


def test_nodes_by_owner_and_their_entries_back_in_order():
    nodes = torch.tensor([9, 0, 4, 8, 1, 5])
    for node_ranges in ([(0, 10)], [(0, 3), (3, 3), (3, 6), (6, 10)]):
        by_owner = NodesByOwner.sort(nodes, node_ranges)
        for positions, of_owner, (start, end) in zip(by_owner.positions, by_owner.nodes, node_ranges, strict=True):
            assert torch.equal(nodes[positions], of_owner)
            assert of_owner.tolist() == [node for node in nodes.tolist() if start <= node < end]
        in_order = torch.cat(list(by_owner.nodes))
        counts = in_order % 3  # entries: none of 9 and 0
        indptr, [restored] = by_owner.restore_segments(counts, [in_order.repeat_interleave(counts)])
        assert indptr.tolist() == [0, 0, 0, 1, 3, 4, 6]
        assert restored.tolist() == [4, 8, 8, 1, 5, 5]
