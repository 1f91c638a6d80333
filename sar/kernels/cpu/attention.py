"""Compiled attention: which loop of `sar.kernels.cpu.attention_loops` runs on which arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.kernels.attention_operands import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score
from sar.kernels.cpu import attention_loops as loops
from sar.kernels.cpu.attention_loops import CHUNK, Heads, Incoming, Scored, Scratch, SourceGradients, Sums
from sar.kernels.cpu.csr_view import by_destination, by_source
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.threads import run_balanced, run_rows
from sar.raw_memory import flat


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """Compiled kernel of `sar.kernels.attention.attend`."""
    x, csr = operands.x, by_destination(block, with_edges=_reads_edges(how, operands))
    scored = _scored(operands.y, x if operands.x_score is None else operands.x_score, operands)
    sums = Sums(*(flat(tensor) for tensor in state))
    arguments = _heads(how, x), flat(x), scored, _flat(operands.weight, x), sums
    run_balanced(loops.attend, csr.indptr, x.shape[1:].numel(), csr, *arguments, private=lambda: [_scratch(x)])


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, GRAD_DOT]."""
    run_rows(loops.head_sums, len(grad), grad.shape[1:].numel(), _heads(how, grad), flat(grad), flat(out), flat(stats))


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Compiled kernel of `sar.kernels.attention.project`."""
    _, heads, dim = x.shape
    out = x.new_empty(len(x), heads)
    shape = np.uint64(heads), np.uint64(dim)
    run_rows(loops.project, len(x), heads * dim, *shape, flat(x), flat(attn), flat(out))
    return out


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Compiled kernel of `sar.kernels.attention.project_grad`."""
    _, heads, dim = x.shape
    parts = _Parts(attn_grad)
    operands = np.uint64(heads), np.uint64(dim), flat(x), flat(attn), flat(grad), flat(x_grad)
    run_rows(loops.project_grad, len(x), heads * dim, *operands, private=parts.another)
    parts.add_up()


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """Compiled kernel of `sar.kernels.attention.attend_grad`; see `Backend`."""
    x, x_score = operands.x, operands.x if operands.x_score is None else operands.x_score
    additive, reads_edges = how.score is Score.ADDITIVE, _reads_edges(how, operands)
    heads, width, weight = _heads(how, x), x.shape[1:].numel(), _flat(operands.weight, x)
    incoming = Incoming(flat(grad), flat(stats))

    csr = by_source(block, with_edges=reads_edges)
    scored = _scored(x_score, stats if additive else operands.y, operands)
    results = SourceGradients(*(_flat(tensor, x) for tensor in (grads.x, grads.x_score, grads.weight)))
    parts = _Parts(grads.y if additive else grads.x[:0])
    to_sources = csr, heads, flat(x), scored, weight, incoming, results
    run_balanced(loops.source_gradients, csr.indptr, width, *to_sources, private=partial(_private, parts, x))
    parts.add_up()
    if additive:
        return

    csr = by_destination(block, with_edges=reads_edges)
    parts = _Parts(grads.attn if grads.attn is not None else grads.x[:0])
    to_destinations = csr, heads, flat(x), _scored(operands.y, x, operands), weight, incoming, flat(grads.y)
    run_balanced(loops.destination_gradients, csr.indptr, width, *to_destinations, private=partial(_private, parts, x))
    parts.add_up()


def _scored(mine: Tensor, theirs: Tensor, operands: AttentionOperands) -> Scored:
    return Scored(flat(mine), flat(theirs), _flat(operands.attn, operands.x))


def _scratch(x: Tensor) -> Scratch:
    """Working memory of one thread."""
    return Scratch(*np.empty((5, CHUNK * x.shape[1]), flat(x).dtype), *np.empty((4, CHUNK + 1), np.uint64))


def _private(parts: _Parts, x: Tensor) -> list[object]:
    return [*parts.another(), _scratch(x)]


def _flat(tensor: Tensor | None, like: Tensor) -> NDArray[Any]:
    """As `flat`; of None an empty array of the same dtype, because kernels are compiled by dtype."""
    return np.empty(0, flat(like).dtype) if tensor is None else flat(tensor)


def _reads_edges(how: Attention, operands: AttentionOperands) -> bool:
    """Whether edge IDs matter: to dropout, and to find weights."""
    return how.dropout > 0 or operands.weight is not None


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
