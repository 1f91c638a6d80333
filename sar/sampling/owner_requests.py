"""Requests to the owners of nodes, with one message to every other worker and one response."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import FieldFormat, MessageLayout
from sar.sampling.draws import copy_rows
from sar.tensors.ids import to_offsets

ID_FORMAT = FieldFormat(torch.int64)


@dataclass(frozen=True)
class NodesByOwner:
    """Nodes sorted stably by owner."""

    nodes: Sequence[Tensor]  # by owner, global IDs, int64
    positions: Sequence[Tensor]  # by owner, the position of each node before sorting, int64

    @classmethod
    def sort(cls, nodes: Tensor, node_ranges: Sequence[tuple[int, int]]) -> "NodesByOwner":
        """Sort global IDs, (n,) int64; worker p owns `node_ranges[p]`."""
        if len(node_ranges) == 1:
            return cls([nodes], [torch.arange(len(nodes), device="cpu")])
        ends = torch.tensor([end for _, end in node_ranges], device="cpu")
        owners = torch.searchsorted(ends, nodes, right=True)
        order = torch.from_numpy(owners.short().numpy().argsort(kind="stable"))  # a radix sort, as they have 16 bits
        counts = torch.bincount(owners, minlength=len(ends)).tolist()
        return cls(nodes.index_select(0, order).split(counts), order.split(counts))

    def restore(self, column: Tensor) -> Tensor:
        """Return one row per node, (n, ...), in the order before sorting."""
        return torch.empty_like(column).index_copy_(0, torch.cat(list(self.positions)), column)

    def restore_segments(self, counts: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Like `restore`, with `counts` entries per node; returns the nodes' offsets, (n + 1,), and the columns."""
        if len(self.nodes) == 1:  # one worker, nothing was sorted
            return to_offsets(counts), list(columns)
        place = self.restore(torch.arange(len(counts), device="cpu"))  # position of each node after sorting
        starts, counts = to_offsets(counts)[place], counts[place]
        indptr = to_offsets(counts)
        order = torch.repeat_interleave(starts - indptr[:-1], counts) + torch.arange(int(indptr[-1]), device="cpu")
        return indptr, [column.index_select(0, order) for column in columns]


class Rows(NamedTuple):
    """Rows of a table, as a column of a response, which are copied directly into the message."""

    table: Tensor  # (N, ...), contiguous
    rows: Tensor  # (n,) int64


def send_requests(
    group: Group,
    call: str,
    requests: Sequence[Sequence[Tensor]],
    respond: Callable[[list[Tensor]], Sequence[Tensor | Rows]],
    formats: Sequence[FieldFormat],
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[list[Tensor]]:
    """Send a request to every worker and respond to theirs; return the columns of each worker's response.

    Called by all workers after agreement, inside `group.guard()`.

    Args:
        group: the workers.
        call: name of the call, for errors.
        requests: for every worker, including this one, the same number of int64 columns.
        respond: returns the columns of the response to a request.
        formats: formats of these columns.
        lengths: for every worker, the numbers of rows in its response, if known.
    """
    others = [p for p in range(group.world_size) if p != group.rank]
    messages = [torch.empty(0, dtype=torch.uint8, device="cpu")] * group.world_size
    for p in others:
        messages[p] = pack(requests[p])
    arrived = group.exchange(f"{call}: requests", messages)
    for p in others:
        messages[p] = pack(respond(unpack(arrived[p], [ID_FORMAT] * len(requests[0]))))
    into = None
    if lengths is not None:  # then messages need not carry their lengths
        own_formats, header = [ID_FORMAT, *formats], 1 + len(formats)
        sizes = [MessageLayout.of(own_formats, [header, *of_worker]).nbytes for of_worker in lengths]
        sizes[group.rank] = 0
        into = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
    responses = group.exchange(f"{call}: responses", messages, into)
    own = [x.table.index_select(0, x.rows) if isinstance(x, Rows) else x for x in respond([*requests[group.rank]])]
    return [own if p == group.rank else unpack(message, formats) for p, message in enumerate(responses)]


def pack(columns: Sequence[Tensor | Rows]) -> Tensor:
    """Pack columns into one message (uint8), which begins with its length in bytes and the columns' rows."""
    formats = [ID_FORMAT, *(FieldFormat.of(x.table if isinstance(x, Rows) else x) for x in columns)]
    lengths = [1 + len(columns), *(len(x.rows if isinstance(x, Rows) else x) for x in columns)]
    layout = MessageLayout.of(formats, lengths)
    message = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
    header = torch.tensor([len(message), *lengths[1:]], device="cpu")
    for view, column in zip(layout.views(message), [header, *columns], strict=True):
        if isinstance(column, Rows):
            copy_rows(column.table, column.rows, view, None)
        else:
            view.copy_(column)
    return message


def unpack(message: Tensor, formats: Sequence[FieldFormat]) -> list[Tensor]:
    """Return the columns of a message, as views of it."""
    formats = [ID_FORMAT, *formats]
    lengths = message[: len(formats) * torch.int64.itemsize].view(torch.int64).tolist()
    return MessageLayout.of(formats, [len(formats), *lengths[1:]]).views(message)[1:]
