"""One-pass attention compiled with Numba, for float32 and float64 tensors in CPU memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.kernels.attention_operands import Attention, Ends, Gradients, Running, Score
from sar.kernels.cpu import attention_loops as loops
from sar.kernels.cpu.attention_steps import PIECE, Heads, Scratch
from sar.kernels.cpu.walks import by_destination, by_source, flat
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.threads import run_balanced, run_rows


def attend(block: EdgeBlock, how: Attention, ends: Ends, from_score: Tensor | None, running: Running) -> None:
    """Numba kernel of `sar.kernels.attention.attend`."""
    heads, walk = _heads(how, ends.x), by_destination(block, with_edges=_reads_edges(how, ends))
    theirs = ends.x if from_score is None else from_score
    operands = [_flat(tensor, ends.x) for tensor in (ends.x, ends.y, theirs, ends.attn, ends.weight, *running)]
    run_balanced(
        loops.attend, walk.indptr, ends.x[0].numel(), walk, heads, *operands, private=lambda: [_scratch(ends.x)]
    )


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, ALONG]."""
    run_rows(loops.head_sums, len(grad), grad[0].numel(), _heads(how, grad), flat(grad), flat(out), flat(stats))


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Numba kernel of `sar.kernels.attention.project`."""
    _, heads, dim = x.shape
    out = x.new_empty(len(x), heads)
    shape = np.uint64(heads), np.uint64(dim)
    run_rows(loops.project, len(x), heads * dim, *shape, flat(x), flat(attn), flat(out))
    return out


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Numba kernel of `sar.kernels.attention.project_grad`."""
    _, heads, dim = x.shape
    parts = _Parts(attn_grad)
    operands = np.uint64(heads), np.uint64(dim), flat(x), flat(attn), flat(grad), flat(x_grad)
    run_rows(loops.project_grad, len(x), heads * dim, *operands, private=parts.another)
    parts.add_up()


def attend_grad(
    block: EdgeBlock,
    how: Attention,
    ends: Ends,
    from_score: Tensor | None,
    grad: Tensor,
    stats: Tensor,
    grads: Gradients,
    from_score_grad: Tensor | None,
) -> None:
    """Numba kernel of `sar.kernels.attention.attend_grad`, with the gradient of sources' scores left to the caller."""
    heads, width, additive = _heads(how, ends.x), ends.x[0].numel(), how.score is Score.ADDITIVE
    mine = ends.x if from_score is None else from_score
    tensors: tuple[Tensor | None, ...]
    tensors = ends.x, mine, ends.y, ends.attn, ends.weight, grad, stats, grads.x, from_score_grad, grads.weight
    walk, parts = by_source(block, with_edges=_reads_edges(how, ends)), _Parts(grads.y if additive else grads.x[:0])
    operands, private = [_flat(tensor, ends.x) for tensor in tensors], partial(_private, parts, ends.x)
    run_balanced(loops.source_gradients, walk.indptr, width, walk, heads, *operands, private=private)
    parts.add_up()
    if not additive:
        tensors = ends.x, ends.y, ends.attn, ends.weight, grad, stats, grads.y
        walk = by_destination(block, with_edges=_reads_edges(how, ends))
        parts = _Parts(grads.attn if grads.attn is not None else grads.x[:0])
        operands = [_flat(tensor, ends.x) for tensor in tensors]
        private = partial(_private, parts, ends.x)
        run_balanced(loops.destination_gradients, walk.indptr, width, walk, heads, *operands, private=private)
        parts.add_up()


def _scratch(x: Tensor) -> Scratch:
    """Room for one thread."""
    numbers = x.new_empty(5, PIECE * x.shape[1]).numpy()
    return Scratch(*numbers, *np.empty((4, PIECE + 1), np.uint64))


def _private(parts: _Parts, x: Tensor) -> list[object]:
    return [*parts.another(), _scratch(x)]


def _flat(tensor: Tensor | None, like: Tensor) -> NDArray[Any]:
    return flat(like[:0] if tensor is None else tensor)


def _reads_edges(how: Attention, ends: Ends) -> bool:
    """Whether edge IDs matter: to dropout, and to find weights."""
    return how.dropout > 0 or ends.weight is not None


class _Parts:
    """A sum to which each thread adds in a tensor of its own."""

    def __init__(self, total: Tensor) -> None:
        self._total = total
        self._parts: list[Tensor] = []

    def another(self) -> list[NDArray[Any]]:
        """The tensor of one more thread; the first adds to the total itself."""
        part = torch.zeros_like(self._total) if self._parts else self._total
        self._parts.append(part)
        return [flat(part)]

    def add_up(self) -> None:
        """Bring the other threads' parts into the total."""
        for part in self._parts[1:]:
            self._total += part


def _heads(how: Attention, x: Tensor) -> Heads:
    _, heads, dim = x.shape
    keep = 1 - how.dropout
    drop, scale = round(how.dropout * 2**32), 1 / keep if keep > 0 else 0.0
    return Heads(
        int(how.score), np.uint64(heads), np.uint64(dim), how.factor, np.uint64(how.seed), np.uint64(drop), scale
    )
