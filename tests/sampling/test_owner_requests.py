"""Messages of several columns, and nodes sorted by their owners."""

import torch

from sar.comm.rows import FieldFormat
from sar.sampling.owner_requests import NodesByOwner, pack, unpack


def test_columns_come_out_of_a_message_as_they_went_in():
    columns = [
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.empty(0, 2, dtype=torch.bfloat16),
        torch.randn(3, 2, 2),
        torch.arange(7, dtype=torch.uint8),
        torch.empty(4, 0),
    ]
    message = pack(columns)
    assert int(message[:8].view(torch.int64)) == len(message)
    found = unpack(message, [FieldFormat.of(column) for column in columns])
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, columns, strict=True))
    assert unpack(pack([]), []) == []


def test_nodes_by_owner():
    nodes = torch.tensor([9, 0, 4, 8, 1, 5])
    by_owner = NodesByOwner.sort(nodes, [(0, 3), (3, 3), (3, 6), (6, 10)])
    assert [of_owner.tolist() for of_owner in by_owner.nodes] == [[0, 1], [], [4, 5], [9, 8]]
    for positions, of_owner in zip(by_owner.positions, by_owner.nodes, strict=True):
        assert torch.equal(nodes[positions], of_owner)


def test_entries_of_nodes_get_back_into_their_order():
    nodes = torch.tensor([9, 0, 4])
    for node_ranges in ([(0, 10)], [(0, 3), (3, 6), (6, 10)]):
        by_owner = NodesByOwner.sort(nodes, node_ranges)
        in_order = torch.cat(list(by_owner.nodes))
        counts = in_order % 3 + 1  # 1, 1 and 2 entries
        entries = in_order.repeat_interleave(counts)
        indptr, [restored] = by_owner.restore_segments(counts, [entries])
        assert indptr.tolist() == [0, 1, 2, 4]
        assert restored.tolist() == [9, 0, 4, 4]
