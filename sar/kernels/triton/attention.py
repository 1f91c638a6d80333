"""One-pass attention with Triton: which kernel of `attention_kernels.py` runs on which tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sar.kernels import attention_operands as statistics
from sar.kernels.attention_operands import (
    Attention,
    AttentionOperands,
    Gradients,
    OnlineSoftmaxState,
    Score,
    raise_peaks,
)
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.triton.aggregate import aggregate_sum, copy_of_sources, in_pieces
from sar.kernels.triton.attention_kernels import (
    attend_kernel,
    destination_gradients,
    dot_kernel,
    project_grad_kernel,
    source_gradients,
)
from sar.kernels.triton.edges import Edges, at_once, by_destination, by_source, launch, ready, sum_type, warps
from sar.splitmix import as_signed

PROGRAMS = 1024
"""Programs that share all rows and have a sum over rows each, for the gradient of a parameter."""
SHARE = 2
"""By how much the tensors of these kernels are smaller than `TILE`: there are more of them."""


class Shape(NamedTuple):
    """How features (rows, heads, dim) are cut: a program takes `lanes` rows at a time, of `heads_at_once` heads."""

    heads: int
    dim: int
    lanes: int  # powers of two, from here on
    heads_at_once: int
    padded_dim: int

    @classmethod
    def of(cls, x: Tensor) -> Shape:
        """For features (rows, heads, dim)."""
        _, heads, dim = x.shape
        padded = triton.next_power_of_2(dim)
        together = min(triton.next_power_of_2(heads), max(1, 128 // padded))
        return cls(heads, dim, at_once(SHARE * together * padded, 16), together, padded)

    @property
    def blocks(self) -> int:
        """Blocks of heads."""
        return int(triton.cdiv(self.heads, self.heads_at_once))

    def constants(self, like: Tensor) -> dict[str, Any]:
        """The constants that kernels are compiled for, with results like this tensor."""
        lanes, heads, dim = self[2:]
        return {
            "LANES": lanes,
            "HEADS": heads,
            "DIM": dim,
            "SUM": sum_type(like),
            "num_warps": warps(SHARE * lanes * heads * dim),
        }


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """Triton kernel of `sar.kernels.attention.attend`."""
    shape = Shape.of(operands.x)
    edges, hubs = by_destination(block, with_edges=operands.reads_edges(how))
    _launch(attend_kernel, (edges.groups, shape.blocks), how, shape, edges, operands, *state)
    if hubs is not None:  # [Note: hubs]
        parts = OnlineSoftmaxState.start(hubs.block.num_src, state.out)
        _launch(attend_kernel, (hubs.edges.groups, shape.blocks), how, shape, hubs.edges, operands, *parts)
        rows, pieces = hubs.block.rows.long(), hubs.block.indptr.diff()
        of = torch.arange(len(rows), device=rows.device).repeat_interleave(pieces, output_size=hubs.block.num_src)
        peak = state.peak[rows].scatter_reduce(0, of.unsqueeze(1).expand_as(parts.peak), parts.peak, "amax")
        raise_peaks(state.peak, [state.out, state.total], rows, peak)
        raise_peaks(parts.peak, [parts.out, parts.total], slice(None), peak[of])
        for part, whole in (parts.total, state.total), (parts.out, state.out):
            aggregate_sum(hubs.block, copy_of_sources(part), whole)


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """Triton kernel of `sar.kernels.attention.attend_grad`; see `Backend`."""
    shape, reads_edges = Shape.of(operands.x), operands.reads_edges(how)

    def to_destinations(edges: Edges, sums: list[Tensor]) -> None:
        # Weights' gradients are sums over heads, so blocks of heads come one after the other if they add to such.
        blocks = shape.blocks if grads.weight is None else 1
        for first in range(0, shape.blocks, blocks):
            programs = edges.groups if how.score is not Score.DYNAMIC else min(edges.groups, PROGRAMS)
            attn_sums = None if how.score is not Score.DYNAMIC else grad.new_zeros(programs, *grad.shape[1:])
            _launch(
                destination_gradients, (programs, blocks), how, shape, edges, operands,
                grad, stats, *sums, attn_sums, grads.weight, edges.groups, first,
            )  # fmt: skip
            if attn_sums is not None:
                assert grads.attn is not None
                grads.attn.add_(attn_sums.sum(0))

    def to_sources(edges: Edges, sums: list[Tensor]) -> None:
        to = *sums, *[None] * (2 - len(sums))
        _launch(source_gradients, (edges.groups, shape.blocks), how, shape, edges, operands, grad, stats, *to)

    in_pieces(by_destination(block, with_edges=reads_edges), [grads.y], to_destinations)
    of_sources = [each for each in (grads.x, grads.x_score) if each is not None]
    in_pieces(by_source(block, with_edges=reads_edges), of_sources, to_sources)


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Triton kernel of `sar.kernels.attention.project`."""
    out = x.new_empty(x.shape[:2])
    _dot(x, attn, out)
    return out


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, GRAD_DOT]."""
    _dot(grad, out, stats[:, statistics.GRAD_DOT])


def _dot(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the products of each head of a, (N, H, D), and of b, like a or (H, D), to out, (N, H)."""
    shape, b_step = Shape.of(a), b[0].numel() if b.dim() == 3 else 0
    operands = ready(a), ready(b), out, len(a), b_step, out.stride(0), shape.heads, shape.dim
    grid = triton.cdiv(len(a), shape.lanes), shape.blocks
    launch(dot_kernel, grid, out, *operands, **shape.constants(out))


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Triton kernel of `sar.kernels.attention.project_grad`."""
    shape = Shape.of(x)
    programs = min(triton.cdiv(len(x), shape.lanes), PROGRAMS)
    sums = attn_grad.new_zeros(programs, *attn_grad.shape)
    operands = ready(x), ready(attn), ready(grad), x_grad, sums, len(x), shape.heads, shape.dim
    launch(project_grad_kernel, (programs, shape.blocks), x, *operands, **shape.constants(x_grad))
    attn_grad.add_(sums.sum(0))


def _launch(
    run: Any, grid: tuple[int, int], how: Attention, shape: Shape, edges: Edges, operands: AttentionOperands,
    *others: Tensor | int | None,
) -> None:  # fmt: skip
    """Launch a kernel over groups and blocks of heads; the first of the others has the type of sums."""
    ends = AttentionOperands._make(None if each is None else ready(each) for each in operands)
    assert isinstance(others[0], Tensor)
    dropout = as_signed(how.seed), how.drop_below, how.kept_scale
    given = edges, ends, float(how.factor), *dropout, shape.heads, shape.dim, *others
    constants = shape.constants(others[0])
    launch(run, grid, operands.x, *given, KIND=int(how.score), DROPS=how.dropout > 0, **constants)
