"""Splits calls out of core into blocks of columns, if the rows of all partitions exceed the page cache.

[Note: column blocks]
Out of core, each partition reads rows of the others from a file, and with a large cut nearly all of them. If the rows
of all partitions fit the page cache, each is read from the disk once. Otherwise the disk reads a layer once for each
partition. Sums of different columns are independent. So we split such a call into several, each with as many columns as
fit, and the disk reads each row once. This costs a write of the result, and a second read of it and of the columns. So
calls that would read rows less often than `WORTH` times are not split.

Calls with gradients are never split.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sar.core.collective import CallContext
from sar.tensors.spillable import at_hand

WORTH = 6
"""Number of reads of a row from which two writes and two reads of it cost less."""
READ_TOGETHER = 2**17
"""Bytes that the disk reads together, even for a single row."""

Given = Tensor | None


def column_blocks(context: CallContext, rows: Tensor, operands: Sequence[Given]) -> list[Sequence[Given]]:
    """Split the operands of a call into those of several calls, one for each block of the result's columns, in order.

    All workers get the same number of calls. Operands (n, C, ...) with as many columns as `rows`, (N_src, C, ...), are
    split; the others are the same in all calls.
    """
    plan, columns = context.relation.plan, rows.shape[1] if rows.dim() > 1 else 1
    row_bytes = rows.itemsize * rows.shape[1:].numel()
    calls = min(-(-plan.rows_of_process * row_bytes // at_hand(rows.device)), columns)
    if torch.is_grad_enabled() or calls <= 1 or plan.times_read(max(READ_TOGETHER // row_bytes, 1)) < WORTH:
        return [operands]
    width = -(-columns // int(calls))
    divided = [
        [block.contiguous() for block in operand.split(width, 1)]
        if operand is not None and operand.dim() == rows.dim() and operand.shape[1] == columns
        else [operand] * -(-columns // width)
        for operand in operands
    ]
    return list(zip(*divided, strict=True))


def in_blocks(call: Callable[..., Tensor], blocks: list[Sequence[Any]]) -> Tensor:
    """Call a function on the operands of each block, and concatenate the results. Frees operands after their use."""
    if len(blocks) == 1:
        return call(*blocks[0])
    return torch.cat([call(*blocks.pop(0)) for _ in range(len(blocks))], 1)
