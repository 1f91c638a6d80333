"""Calls in blocks of columns, where partitions take turns and the rows of all are more than the page cache holds.

[Note: column blocks]
Partitions that take turns read each other's rows in a file, each nearly all of them where the cut is large. What one
has read is at hand for the next if the rows of all fit the page cache. Otherwise the disk reads a layer once for each
partition. Columns are summed each for itself. So such a call becomes several, one after the other, each with as many
columns as fit: then the disk reads a row once. What that costs is to write the result, too, and to read it and the
columns once more; so calls that would read rows less often than `WORTH` times stay whole.

Only without gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sar.core.collective import CallContext
from sar.spillable import at_hand

WORTH = 6
"""Times that the disk reads a row, from which on two writes and as many reads of it cost less."""
READ_TOGETHER = 2**17
"""Bytes that the disk reads for one row of them."""

Given = Tensor | None


def column_blocks(context: CallContext, rows: Tensor, operands: Sequence[Given]) -> list[Sequence[Given]]:
    """The operands of calls that each make some of a result's columns, of all in the order of their columns.

    There are equally many on all workers. Operands with a column for each of the rows', (n, C, ...) beside (N_src, C,
    ...), are divided; the others are the same in all calls.
    """
    plan, columns = context.relation.plan, rows.shape[1] if rows.dim() > 1 else 1
    row_bytes = rows.itemsize * rows.shape[1:].numel()
    calls = min(-(-plan.rows_of_process * row_bytes // at_hand(rows.device)), columns)
    if torch.is_grad_enabled() or calls <= 1 or plan.times_read(max(READ_TOGETHER // row_bytes, 1)) < WORTH:
        return [operands]
    width = -(-columns // int(calls))
    divided = [
        [block.contiguous() for block in given.split(width, 1)]
        if given is not None and given.dim() == rows.dim() and given.shape[1] == columns
        else [given] * -(-columns // width)
        for given in operands
    ]
    return list(zip(*divided, strict=True))


def in_blocks(call: Callable[..., Tensor], blocks: list[Sequence[Any]]) -> Tensor:
    """The results of a call on the operands of each block, side by side; operands are free once they are used."""
    if len(blocks) == 1:
        return call(*blocks[0])
    return torch.cat([call(*blocks.pop(0)) for _ in range(len(blocks))], 1)
