"""Questions to the owners of nodes: one message to every other worker, and one back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.kernels.neighbor_sampling import order_segments, to_offsets

ID_FORMAT = FieldFormat(torch.int64)


@dataclass(frozen=True)
class NodesByOwner:
    """Nodes sorted by owner; those of one owner keep their order.

    nodes: (n,) int64 global IDs.
    begin: (W + 1,), the nodes of worker p are nodes[begin[p]:begin[p + 1]].
    positions: (n,) int64, where each node was before sorting.
    """

    nodes: Tensor
    begin: list[int]
    positions: Tensor

    @classmethod
    def sort(cls, nodes: Tensor, ends: Sequence[int]) -> "NodesByOwner":
        """Sort global IDs, (n,) int64; those below ends[p] that no worker before p has are worker p's."""
        if len(ends) == 1:
            return cls(nodes, [0, len(nodes)], torch.arange(len(nodes)))
        owners = torch.searchsorted(torch.tensor(ends), nodes, right=True)
        order = torch.argsort(owners, stable=True)
        begin = to_offsets(torch.bincount(owners, minlength=len(ends))).tolist()
        return cls(nodes.index_select(0, order), begin, order)

    def of(self, worker: int) -> Tensor:
        """The nodes of one owner."""
        return self.nodes[self.begin[worker] : self.begin[worker + 1]]

    def positions_of(self, worker: int) -> Tensor:
        """Where the nodes of one owner were."""
        return self.positions[self.begin[worker] : self.begin[worker + 1]]

    def restore(self, counts: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Put `counts` entries of each node, which come in this order, into the order before sorting.

        Returns:
            (n + 1,) offsets of the nodes, and the columns.
        """
        if len(self.begin) == 2:  # one worker, nothing was sorted
            return to_offsets(counts), list(columns)
        indptr, order = order_segments(self._place, counts)
        return indptr, [column.index_select(0, order) for column in columns]

    @cached_property
    def _place(self) -> Tensor:
        """(n,) int64, where each node is now."""
        place = torch.empty_like(self.positions)
        place[self.positions] = torch.arange(len(self.positions))
        return place


def ask_owners(
    group: Group,
    call: str,
    questions: Sequence[Sequence[Tensor]],
    answer: Callable[[list[Tensor]], Tensor],
    replies: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Send every other worker a question, answer theirs, and return their answers.

    Args:
        group: the workers, which have agreed on the call; inside its `guard()`.
        call: what is asked, for errors.
        questions: one for every worker, as many int64 columns in each. The own one is left out.
        answer: makes a message (uint8) of a question.
        replies: where the answers go, where their sizes are known; else they are made by `pack`.

    Returns:
        One message for every worker, empty for this one.
    """
    nothing = torch.empty(0, dtype=torch.uint8)
    formats = [ID_FORMAT] * len(questions[0])
    others = [p for p in range(group.world_size) if p != group.rank]
    messages = [nothing] * group.world_size
    for p in others:
        messages[p] = pack(questions[p])
    asked = group.exchange(f"{call}: questions", messages)
    for p in others:
        messages[p] = answer(unpack(asked[p], formats))
    return group.exchange(f"{call}: answers", messages, replies)


def ask_everyone(
    group: Group,
    call: str,
    questions: Sequence[Sequence[Tensor]],
    answer: Callable[[list[Tensor]], list[Tensor]],
    formats: Sequence[FieldFormat],
) -> list[list[Tensor]]:
    """The columns, of these formats, that every worker answers, this one too; otherwise as `ask_owners`."""
    replies = ask_owners(group, call, questions, lambda question: pack(answer(question)))
    own = answer(list(questions[group.rank]))
    return [own if worker == group.rank else unpack(reply, formats) for worker, reply in enumerate(replies)]


def pack(columns: Sequence[Tensor]) -> Tensor:
    """The columns in one message (uint8), which begins with its own length in bytes and with theirs in rows."""
    formats = [ID_FORMAT, *map(FieldFormat.of, columns)]
    lengths = [1 + len(columns), *map(len, columns)]
    message = torch.empty(message_bytes(formats, lengths), dtype=torch.uint8)
    header = torch.tensor([len(message), *lengths[1:]])
    for view, column in zip(columns_of(message, formats, lengths), [header, *columns], strict=True):
        view.copy_(column)
    return message


def unpack(message: Tensor, formats: Sequence[FieldFormat]) -> list[Tensor]:
    """The columns of a message, as views of it."""
    header = ID_FORMAT.view(message, 0, 1 + len(formats))
    lengths = [len(header), *header[1:].tolist()]
    return columns_of(message, [ID_FORMAT, *formats], lengths)[1:]


def message_bytes(formats: Sequence[FieldFormat], lengths: Sequence[int]) -> int:
    """The size of a message of columns that are so many rows long."""
    return sum(field.aligned_bytes(rows) for field, rows in zip(formats, lengths, strict=True))


def columns_of(message: Tensor, formats: Sequence[FieldFormat], lengths: Sequence[int]) -> list[Tensor]:
    """Views of the columns that lie in a message one after another."""
    views, begin = [], 0
    for field, rows in zip(formats, lengths, strict=True):
        views.append(field.view(message, begin, rows))
        begin += field.aligned_bytes(rows)
    return views
