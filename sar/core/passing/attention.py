"""One-pass attention across workers: softmax over a node's in-edges, and the weighted sum of their sources' features.

[Note: one pass over shards]
A destination's in-edges are in all shards, so their softmax is made as the shards come by: relative to the greatest
score so far, as in `sar.kernels.attention`. What travels is the sources' features; a reader makes their scores itself.
The backward fetches the features again (or has kept them), makes each weight anew from the logarithm of its
destination's sum, and sends one gradient home. The rules about agreement are those of `core/sequential.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sar.comm import session
from sar.comm.exchange import Exchange, Portion
from sar.comm.plan import Tile
from sar.comm.rows import FieldFormat, RowFormat
from sar.core.eager import uncompiled
from sar.core.passing.message_passing import Passing
from sar.errors import GraphError
from sar.kernels import EdgeBlock, accumulation_dtype, add_rows
from sar.kernels.attention import attend, attend_grad, destination_statistics, note_scores, project, project_grad
from sar.kernels.attention_operands import Attention, Ends, Gradients, Running, Score

SEED_STEP = 0xD1342543DE82EF95
"""Between the dropout seeds of workers, whose edge IDs are the same numbers. Not the generator's own step from one
number to the next: that would make the fates of a worker's edges those of its neighbour's, shifted by one."""


class Remake(NamedTuple):
    """x = function(*tensors) once more, from tensors that autograd keeps anyway, such as the input of a projection."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]


@uncompiled
def attention(
    passing: Passing,
    score: Score,
    x: Tensor,
    y: Tensor,
    *,
    attn: Tensor | None = None,
    attn_dst: Tensor | None = None,
    factor: float,
    dropout: float = 0.0,
    edge_weight: Tensor | None = None,
    remake: Remake | None = None,
) -> Tensor:
    """Sum the features of each node's sources, weighted by softmax(score) over its in-edges; a collective call.

    Args:
        passing: the relation.
        score: how scores are made of x and y; see `Score`.
        x: features of the sources, (N_src, H, D).
        y: features of the destinations, (N_dst, H, D); may be x itself.
        attn: (H, D) parameters of ADDITIVE (for sources) and DYNAMIC scores.
        attn_dst: (H, D) parameters of ADDITIVE scores for destinations.
        factor: slope of the leaky ReLU below 0, at least 0; for DOT, what products are multiplied with.
        dropout: probability with which a weight is dropped; the seed comes from torch's default generator.
        edge_weight: (E,) what each softmax is multiplied with, after dropout. Default 1.
        remake: how to make x again in the backward, so that it is not kept until then. Default None.

    Returns:
        (N_dst, H, D), 0 for nodes without in-edges; in the widest dtype of the operands.

    Raises:
        GraphError: for operands that do not fit the graph or each other.
        CommunicationError: where another worker failed or makes another call.
    """
    relation, group = passing.relation, passing.structure.group
    _check(x, y, edge_weight, relation.num_src, relation.num_dst, relation.num_edges)
    seed = int(torch.randint(2**62, ())) + group.rank * SEED_STEP if dropout else 0
    how = Attention(score, factor, dropout, seed % 2**64)
    words = passing.describe(f"attention, {score.name} {factor} {dropout}: {x.dtype} {x.shape[1:]}")
    call = _Call(passing, how, remake.function if remake is not None else None, words)
    made_of = remake.tensors if remake is not None else ()
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled() and group.world_size > 1)
    result: Tensor = _Attention.apply(anchor, x, None if y is x else y, attn, attn_dst, edge_weight, call, *made_of)
    return result


def _check(x: Tensor, y: Tensor, edge_weight: Tensor | None, num_src: int, num_dst: int, num_edges: int) -> None:
    if x.dim() != 3 or y.dim() != 3 or len(x) != num_src or len(y) != num_dst or x.shape[1:] != y.shape[1:]:
        raise GraphError(
            f"Attention got features {tuple(x.shape)} of sources and {tuple(y.shape)} of destinations; "
            f"expected ({num_src}, heads, dim) and ({num_dst}, heads, dim)."
        )
    if edge_weight is not None and edge_weight.shape != (num_edges,):
        raise GraphError(f"Edge weights have shape {tuple(edge_weight.shape)}; expected ({num_edges},).")


@dataclass(frozen=True)
class _Call:
    passing: Passing
    how: Attention
    remake: Callable[..., Tensor] | None
    words: str

    @property
    def distributed(self) -> bool:
        return self.passing.structure.group.world_size > 1

    @property
    def own_block(self) -> EdgeBlock:
        return self.passing.relation.blocks[self.passing.structure.group.rank]

    def exchange(self, x: Tensor) -> Exchange:
        """The exchange of rows of x, or their gradients in float32 at least."""
        passing = self.passing
        widest = RowFormat((FieldFormat(accumulation_dtype(x.dtype), tuple(x.shape[1:])),))
        pool = session.buffer_pool()
        return Exchange(passing.structure.group, passing.relation.plan, passing.settings, widest, pool, self.words)


class _Attention(torch.autograd.Function):
    """See [Note: one pass over shards]. y is None where it is x."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        y: Tensor | None,
        attn: Tensor | None,
        attn_dst: Tensor | None,
        edge_weight: Tensor | None,
        call: _Call,
        *made_of: Tensor,
    ) -> Tensor:
        group = call.passing.structure.group
        needed = any(ctx.needs_input_grad[1:6])
        with group.guard():
            if call.distributed:
                needed = any([needed, *group.agree(call.words, int(needed))])
            keep = needed and call.passing.settings.keep
            out, log_total, kept = _forward(call, x, x if y is None else y, attn, attn_dst, edge_weight, keep)
        ctx.call, ctx.tiles = call, list(kept)
        if needed:
            kept_x = x if call.remake is None else None
            ctx.save_for_backward(kept_x, y, attn, attn_dst, edge_weight, out, log_total, *kept.values(), *made_of)
        operands = [tensor for tensor in (x, y, attn, attn_dst, edge_weight) if tensor is not None]
        result = out.to(reduce(torch.promote_types, (tensor.dtype for tensor in operands)))
        if not needed:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, log_total = (saved := ctx.saved_tensors)[:7]  # unpacked once, as checkpoints require
        rows, made_of = saved[7 : 7 + len(ctx.tiles)], saved[7 + len(ctx.tiles) :]
        kept = dict(zip(ctx.tiles, rows, strict=True))
        with ctx.call.passing.structure.group.guard():
            grad = grad.to(out.dtype).contiguous()
            stats = destination_statistics(ctx.call.how, log_total, grad, out)
            # The result has served: its memory is free for what comes, unless the graph is retained.
            del saved, out, log_total
            ctx.maybe_clear_saved_tensors()
            if ctx.call.remake is not None:
                with torch.no_grad():
                    inputs[0] = ctx.call.remake(*made_of)
            grads = _backward(ctx.call, inputs, stats, kept, grad)
        needed = ctx.needs_input_grad[1:6]
        return (
            None,
            *(g.to(i.dtype) if n and g is not None else None for g, i, n in zip(grads, inputs, needed, strict=True)),
            *[None] * (1 + len(made_of)),
        )


def _forward(
    call: _Call,
    x: Tensor,
    y: Tensor,
    attn: Tensor | None,
    attn_dst: Tensor | None,
    edge_weight: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, dict[Tile, Tensor]]:
    """The result, (N_dst, H, D), the logarithms of the sums of exponentials, (N_dst, H), and fetched rows to keep."""
    relation, dtype = call.passing.relation, accumulation_dtype(x.dtype)
    # The first tiles travel while all of the own nodes' part is computed.
    portions = call.exchange(x).sweep(x.device, [x], keep=keep) if call.distributed else ()
    ends = _ends(dtype, x, y, attn, attn_dst, edge_weight)
    running, kept = Running.start(relation.num_dst, ends.x), {}
    attend(call.own_block, call.how, ends, running)
    for portion in portions:
        assert portion.rows is not None
        [rows] = portion.rows
        attend(relation.tile(portion.tile), call.how, ends._replace(x=rows.to(dtype)), running)
        if keep:
            kept[portion.tile] = rows
    return *running.finish(relation.in_degrees), kept


def _ends(
    dtype: torch.dtype,
    x: Tensor,
    y: Tensor,
    attn: Tensor | None,
    attn_dst: Tensor | None,
    edge_weight: Tensor | None,
) -> Ends:
    """The operands of the kernels on this worker's own nodes."""
    x, y = x.detach().to(dtype).contiguous(), y.detach().to(dtype)
    if attn_dst is not None:
        y = project(y, attn_dst.detach().to(dtype))
    return Ends(
        x,
        y,
        None if attn is None else attn.detach().to(dtype),
        None if edge_weight is None else edge_weight.detach().to(dtype),
    )


def _backward(
    call: _Call, inputs: list[Any], stats: Tensor, kept: dict[Tile, Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs: x, y, attn, attn_dst and edge_weight; for `stats` see `destination_statistics`."""
    x, y, attn, attn_dst, edge_weight = inputs
    relation, dtype = call.passing.relation, accumulation_dtype(x.dtype)
    x_grad = torch.zeros(x.shape, dtype=dtype, device=x.device)
    portions = _post_backward(call, x, x_grad) if call.distributed else ()
    features = x if y is None else y
    ends = _ends(dtype, x, features, attn, attn_dst, edge_weight)
    note_scores(call.how, stats, ends.y)
    # Where sources are destinations, both gradients go to one tensor.
    features_grad = x_grad if y is None else x.new_zeros(y.shape, dtype=dtype)
    grads = Gradients(
        x_grad,
        features_grad if attn_dst is None else torch.zeros_like(ends.y),
        *(None if t is None else torch.zeros_like(t) for t in (ends.attn, ends.weight)),
    )
    attend_grad(call.own_block, call.how, ends, grad, stats, grads)
    for portion in portions:
        assert portion.grads is not None
        [rows] = portion.rows if portion.rows is not None else [kept[portion.tile]]
        here, here_grads = ends._replace(x=rows.to(dtype)), grads._replace(x=portion.grads[0])
        attend_grad(relation.tile(portion.tile), call.how, here, grad, stats, here_grads)
    attn_dst_grad = None
    if attn_dst is not None:
        attn_dst_grad = torch.zeros_like(attn_dst, dtype=dtype)
        project_grad(features.detach().to(dtype), attn_dst.to(dtype), grads.y, features_grad, attn_dst_grad)
    return x_grad, None if y is None else features_grad, grads.attn, attn_dst_grad, grads.weight


def _post_backward(call: _Call, x: Tensor, x_grad: Tensor) -> Iterator[Portion]:
    """Agree on the backward, and start to fetch x; gradients that come home are added to x_grad."""
    call.passing.structure.group.agree(f"backward of {call.words}")
    return call.exchange(x).sweep(
        x.device,
        None if call.passing.settings.keep else [x],
        grads=RowFormat.of([x_grad]),
        deliver=lambda rows, incoming: add_rows(rows, incoming[0], x_grad),
    )
