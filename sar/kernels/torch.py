"""The kernels in plain torch, a backend of `sar.kernels.api`: they run on GPUs and check the compiled ones.

Sums of source rows, copied or weighted, are products with a sparse matrix, which torch gives to cuSPARSE or MKL.
Everything else gathers and scatters rows of a chunk of edges at a time, which are small compared to the graph.
Only the scores of attention are kept for a whole block, (E_block, H). Arithmetic is done in the dtype of the output,
and in float32 if that is a half precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from sar.kernels.edge_block import EdgeBlock, Transposed
from sar.kernels.ops import (
    GRAD_DOT,
    INVERSE,
    PEAK,
    Attention,
    AttentionOperands,
    EdgeMessage,
    EdgeOperand,
    Gradients,
    OnlineSoftmaxState,
    Op,
    Shape,
    Target,
    raise_peaks,
)
from sar.tensors.ids import to_offsets
from sar.tensors.lasting import lasting
from sar.tensors.splitmix import STEP, as_signed, mix_tensor, shift_right
from sar.tensors.views import accumulation_dtype

CHUNK_ELEMENTS = 4 * 2**20  # how many elements a tensor with a row per edge of a chunk has at most
PRODUCT_DEVICES = {"cuda", *(("cpu",) if torch.backends.mkl.is_available() else ())}
PRODUCT_DTYPES = {torch.float32, torch.float64}


@dataclass(frozen=True)
class EdgeChunk:
    """The edges at positions begin to end of a block, with the rows of their sources, destinations and themselves."""

    begin: int
    end: int
    src: Tensor  # (end - begin,) int64, as are the others
    dst: Tensor
    ids: Tensor

    def rows(self, target: Target) -> Tensor:
        """The row of each edge in operands of this target."""
        return (self.src, self.dst, self.ids)[target]


def edge_chunks(block: EdgeBlock, shape: Shape) -> Iterator[EdgeChunk]:
    """Split a block into chunks of edges, each with at most `CHUNK_ELEMENTS` elements at `shape` elements an edge."""
    step = max(1, CHUNK_ELEMENTS // max(1, prod(shape)))
    for begin in range(0, block.num_edges, step):
        end = min(begin + step, block.num_edges)
        if block.device.type == "cpu":
            dst = block.destinations(begin, end)
        else:  # on GPUs, keep the destinations, which cost a search each time
            if "dst" not in block.derived:
                block.derived["dst"] = lasting(lambda: block.dst)()
            dst = block.derived["dst"][begin:end].long()
        yield EdgeChunk(begin, end, block.cols[begin:end].long(), dst, block.ids(begin, end))


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor, fresh: bool = False) -> None:
    """Reference of `sar.kernels.aggregate_sum`."""
    if fresh:
        out.zero_()
    if message.lhs.values is not None and _is_product(message, message.lhs.values, out):
        _add_product(block.rows, block.indptr, block.cols, _weights(block, message, out), message.lhs.values, out)
        return
    for edges, values in _messages(block, message, out):
        out.index_add_(0, edges.dst, values)


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Reference of `sar.kernels.aggregate_cmp`."""
    reduce, worst = ("amax", -torch.inf) if largest else ("amin", torch.inf)
    if not out.is_floating_point():
        worst = torch.iinfo(out.dtype).min if largest else torch.iinfo(out.dtype).max
    for edges, values in _messages(block, message, out):
        index = _like(edges.dst, values).expand_as(values)
        valid, before = ~values.isnan(), out[edges.dst]
        out.scatter_reduce_(0, index, values.where(valid, worst), reduce)
        best = out[edges.dst]
        arg.scatter_(0, index, arg[edges.dst].where(best == before, -1))  # the same for all edges of a destination
        winners = _like(edges.ids, values).where(valid & (values == best), -1)
        arg.scatter_reduce_(0, index, winners.to(arg.dtype), "amax")


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Reference of `sar.kernels.add_rows`."""
    rows = rows.long()  # distinct, so a plain read-add-write is right
    out.index_copy_(0, rows, out.index_select(0, rows).add_(values))


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Reference of `sar.kernels.edge_apply`."""
    for edges, values in _messages(block, message, out):
        out[edges.ids] = values


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None,
    fresh: bool = False,
) -> None:  # fmt: skip
    """Reference of `sar.kernels.aggregate_grad`."""
    if fresh:
        out.zero_()
    if (
        wrt == "lhs" and arg is None and grad.target is Target.V
        and grad.values is not None and _is_product(message, grad.values, out)
    ):  # fmt: skip
        weights = _weights(block, message, out)
        indptr, dst, positions, sources = block.transposed(transpose)
        _add_product(sources, indptr, dst, weights[positions], grad.values, out)
        return
    dtype = accumulation_dtype(out.dtype)
    lhs_aligned, rhs_aligned, full, grad_aligned = message.aligned
    operand, aligned = message.operands[wrt == "rhs"], rhs_aligned if wrt == "rhs" else lhs_aligned
    for edges in edge_chunks(block, full):
        x = _gather(message.lhs, edges, lhs_aligned, dtype)
        y = _gather(message.rhs, edges, rhs_aligned, dtype)
        g = _gather(grad, edges, grad_aligned, dtype)
        if message.op in (Op.MUL, Op.DOT):
            term = g * (y if wrt == "lhs" else x)
        elif message.op is Op.DIV:
            term = g / y if wrt == "lhs" else -g * x / (y * y)
        else:
            term = -g if message.op is Op.SUB and wrt == "rhs" else g
        if arg is not None:
            best = arg[edges.dst].view(g.shape)
            term = term.where(best == _like(edges.ids, best), 0)
        term = term.sum_to_size(term.shape[:1] + aligned).reshape(term.shape[:1] + operand.shape)
        out.index_add_(0, edges.rows(operand.target), term.to(out.dtype))


def transpose(block: EdgeBlock) -> Transposed:
    """The edges of a block by source, for `EdgeBlock.transposed`."""
    order = block.cols.argsort(stable=True)
    indptr = to_offsets(block.cols.bincount(minlength=block.num_src)).to(block.indptr.dtype)
    return Transposed(indptr, block.dst[order], order.to(block.indptr.dtype))


def _is_product(message: EdgeMessage, rows: Tensor, out: Tensor) -> bool:
    """Whether messages are source rows times at most one number, so that a sparse product can sum them."""
    weight = message.rhs
    is_linear = message.op is Op.COPY or (
        message.op is Op.MUL and weight is not None and weight.target is Target.E
        and prod(weight.shape) == 1 and weight.values is not None and weight.values.dtype == out.dtype
    )  # fmt: skip
    return (
        is_linear and message.lhs.target is Target.U
        and rows.dtype == out.dtype and out.dtype in PRODUCT_DTYPES
        and out.device.type in PRODUCT_DEVICES and rows.numel() > 0 and out.numel() > 0
    )  # fmt: skip


def _weights(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> Tensor:
    """The factor of each edge in a message that `_is_product`, (E,) in block order."""
    if message.rhs is None or message.rhs.values is None:
        return out.new_ones(block.num_edges)
    weights, ids = message.rhs.values.view(-1), block.edge_ids
    return weights[block.edge_offset :][: block.num_edges] if ids is None else weights[ids]


def _add_product(
    rows: Tensor | None, indptr: Tensor, cols: Tensor, weights: Tensor, values: Tensor, out: Tensor
) -> None:
    """Add the weighted sums of rows `cols` of `values` to `rows` of `out`, to all in order if None."""
    _expect_beta_warning()
    shape = len(indptr) - 1, len(values)
    matrix = torch.sparse_csr_tensor(indptr, cols.to(indptr.dtype), weights, shape, check_invariants=False)
    sums = (matrix @ values.reshape(len(values), -1)).view(-1, *out.shape[1:])
    if rows is None:
        out[: len(sums)] += sums
    else:
        out.index_add_(0, rows, sums)


@cache
def _expect_beta_warning() -> None:
    """Ignore torch's warning that this layout is in beta, which does not concern users of sar."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = torch.zeros(0, dtype=torch.int64)
        torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), empty, empty.float(), (0, 0), check_invariants=False)


def _like(rows: Tensor, elements: Tensor) -> Tensor:
    """(E,) rows with as many dimensions as (E, *) elements."""
    return rows.view(-1, *[1] * (elements.dim() - 1))


def _gather(operand: EdgeOperand | None, edges: EdgeChunk, aligned: Shape, dtype: torch.dtype) -> Any:
    if operand is None or operand.values is None:
        return None
    rows = edges.rows(operand.target)
    return operand.values.index_select(0, rows).to(dtype).view(rows.numel(), *aligned)


def _messages(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> Iterator[tuple[EdgeChunk, Tensor]]:
    """The messages of the block, one chunk of edges at a time, (chunk, *trailing shape of out)."""
    dtype = accumulation_dtype(out.dtype)
    lhs_aligned, rhs_aligned, full, _ = message.aligned
    for edges in edge_chunks(block, full):
        x = _gather(message.lhs, edges, lhs_aligned, dtype)
        y = _gather(message.rhs, edges, rhs_aligned, dtype)
        yield edges, _OPERATIONS[message.op](x, y).reshape(edges.src.shape + out.shape[1:]).to(out.dtype)


_OPERATIONS: dict[Op, Callable[[Tensor, Any], Tensor]] = {
    Op.COPY: lambda x, y: x,
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
    Op.DIV: torch.div,
    Op.DOT: lambda x, y: (x * y).sum(-1, keepdim=True),
}


def attend(block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState) -> None:
    """Reference of `sar.kernels.attention.attend`."""
    out, peak, total = state
    operands = operands._replace(x=operands.x.to(out.dtype), y=operands.y.to(out.dtype))
    features = tuple(operands.x.shape[1:])
    score = operands.x.new_empty(block.num_edges, operands.x.shape[1])
    greatest = peak.clone()
    for edges in edge_chunks(block, features):
        here = _scores(how, operands, edges)
        score[edges.begin : edges.end] = here
        dst = edges.dst.unsqueeze(1).expand_as(here)
        greatest.scatter_reduce_(0, dst, here.nan_to_num(-torch.inf, torch.inf), "amax")
    raise_peaks(peak, [out, total], slice(None), greatest)
    for edges in edge_chunks(block, features):
        here = score[edges.begin : edges.end]
        # -inf weighs nothing, even where all scores are; NaN goes through.
        weight = torch.where(here == -torch.inf, 0, (here - peak[edges.dst]).exp())
        total.index_add_(0, edges.dst, weight)
        weight *= _shares(how, operands, edges)[1]
        out.index_add_(0, edges.dst, operands.x[edges.src].mul_(weight.unsqueeze(2)))


def project(x: Tensor, attn: Tensor) -> Tensor:
    """Reference of `sar.kernels.attention.project`."""
    return (x * attn).sum(-1)


def project_grad(x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None:
    """Reference of `sar.kernels.attention.project_grad`."""
    x_grad.add_(grad.unsqueeze(2) * attn)
    attn_grad.add_((grad.unsqueeze(2) * x).sum(0))


def head_sums(how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None:
    """Write the sums of grad * out over each head to stats[:, GRAD_DOT]."""
    stats[:, GRAD_DOT] = (grad * out).sum(-1)


def attend_grad(
    block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor, grads: Gradients
) -> None:
    """Reference of `sar.kernels.attention.attend_grad`; see `Backend`."""
    operands = operands._replace(x=operands.x.to(stats.dtype), y=operands.y.to(stats.dtype))
    grad = grad.to(stats.dtype)
    for edges in edge_chunks(block, tuple(operands.x.shape[1:])):
        score = _scores(how, operands, edges)
        softmax = (score - stats[edges.dst, PEAK]).exp() * stats[edges.dst, INVERSE]
        kept, share = _shares(how, operands, edges)
        out_grad = grad[edges.dst]
        grad_dot = (out_grad * operands.x[edges.src]).sum(-1)
        if grads.weight is not None:
            grads.weight[edges.ids] = (softmax * kept * grad_dot).sum(1)
        score_grad = softmax * (share * grad_dot - stats[edges.dst, GRAD_DOT])
        grads.x.index_add_(0, edges.src, out_grad.mul_((softmax * share).unsqueeze(2)))
        if grads.x_score is None:
            x, y, score_grad = operands.x[edges.src], operands.y[edges.dst], score_grad.unsqueeze(2)
            if operands.attn is None:  # DOT
                score_grad = how.factor * score_grad
                x_grad, y_grad = y.mul_(score_grad), x.mul_(score_grad)
            else:  # DYNAMIC
                assert grads.attn is not None
                raw = x.add_(y)
                grads.attn.add_((score_grad * leaky_relu(raw, how.factor)).sum(0))
                x_grad = y_grad = operands.attn * torch.where(raw > 0, score_grad, score_grad * how.factor)
            grads.x.index_add_(0, edges.src, x_grad)
        else:  # ADDITIVE
            y_grad = torch.where(score > 0, score_grad, score_grad * how.factor)
            grads.x_score.index_add_(0, edges.src, y_grad)
        grads.y.index_add_(0, edges.dst, y_grad)


def _scores(how: Attention, operands: AttentionOperands, edges: EdgeChunk) -> Tensor:
    """(chunk, H)"""
    if operands.x_score is not None:
        return leaky_relu(operands.x_score[edges.src] + operands.y[edges.dst], how.factor)
    x, y = operands.x[edges.src], operands.y[edges.dst]
    if operands.attn is None:
        return how.factor * x.mul_(y).sum(-1)
    return leaky_relu(x.add_(y), how.factor).mul_(operands.attn).sum(-1)


def _shares(how: Attention, operands: AttentionOperands, edges: EdgeChunk) -> tuple[Tensor, Tensor]:
    """The factors of dropout, and those of dropout and edge weights together; (chunk, H) or (1, 1) each."""
    kept = operands.x.new_ones(1, 1)
    if how.dropout:
        kept = dropout_factors(how, edges.ids, operands.x.shape[1], operands.x.dtype)
    return kept, kept if operands.weight is None else kept * operands.weight[edges.ids].unsqueeze(1)


def dropout_factors(how: Attention, ids: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """The factors of dropout for edges, (edges, heads), from the same random numbers as in the compiled loops."""
    counter = ids.unsqueeze(1) * heads + torch.arange(1, heads + 1, device=ids.device)
    z = mix_tensor(counter * as_signed(STEP) + as_signed(how.seed))
    kept: Tensor = shift_right(z, 32) >= how.drop_below
    return kept.to(dtype) * how.kept_scale
