"""Floors of an epoch's time: the dense layers alone, and the aggregations alone, without any exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.bounds import Exchanged
from benchmarks.clock import Time
from benchmarks.models import HEADS, Model
from sar.core.relation import Relation
from sar.kernels import EdgeBlock, EdgeMessage, EdgeOperand, Op, Target, aggregate_grad, aggregate_sum
from sar.kernels.attention import attend, attend_grad, note_scores
from sar.kernels.attention import destination_statistics as statistics_of
from sar.kernels.ops import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score

SLOPE = 0.2  # of GATConv's leaky ReLU


def dense_time(model: Model, x: Tensor, labels: Tensor, train: Tensor) -> Time:
    """Time of one training step of the layers without message passing, on own rows."""
    optimizer = torch.optim.Adam(model.parameters())
    start = Time.now()
    loss = functional.cross_entropy(model.dense(x)[train], labels[train], reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return start.since()


def aggregation_time(relation: Relation, layers: Sequence[Exchanged]) -> Time:
    """Time of the kernels of one epoch, forward and backward, on random rows that are all at hand."""
    times = [_attention(relation, layer) if layer.values_read else _sum(relation, layer) for layer in layers]
    return Time(*map(sum, zip(*times, strict=True)))


def _sum(relation: Relation, layer: Exchanged) -> Time:
    columns = layer.columns
    sources = [torch.rand(block.num_src, columns) for block in relation.blocks]
    out, grad = torch.zeros(relation.num_dst, columns), torch.rand(relation.num_dst, columns)
    start = Time.now()
    for block, rows in zip(relation.blocks, sources, strict=True):
        aggregate_sum(block, EdgeMessage(Op.COPY, EdgeOperand.of(rows, Target.U)), out)
    if not layer.constant:
        for block, rows in zip(relation.blocks, sources, strict=True):
            _copy_grad(block, grad, torch.zeros_like(rows))
    return start.since()


def _copy_grad(block: EdgeBlock, grad: Tensor, source_grad: Tensor) -> None:
    copy = EdgeMessage(Op.COPY, EdgeOperand(None, Target.U, tuple(source_grad.shape[1:])))
    aggregate_grad(block, copy, "lhs", EdgeOperand.of(grad, Target.V), source_grad)


def _attention(relation: Relation, layer: Exchanged) -> Time:
    shape, how = (HEADS, layer.columns // HEADS), Attention(Score.ADDITIVE, SLOPE)
    attn, grad = torch.rand(shape), torch.rand(relation.num_dst, *shape)
    y = torch.rand(relation.num_dst, HEADS)
    ends = [AttentionOperands(torch.rand(block.num_src, *shape), y, attn, None) for block in relation.blocks]
    start = Time.now()
    running = OnlineSoftmaxState.start(relation.num_dst, grad)
    for block, operands in zip(relation.blocks, ends, strict=True):
        attend(block, how, operands, running)
    out, normaliser = running.finish(relation.in_degrees)
    stats = statistics_of(how, normaliser, grad, out)
    note_scores(how, stats, y)
    y_grad, attn_grad = torch.zeros_like(y), torch.zeros_like(attn)
    for block, operands in zip(relation.blocks, ends, strict=True):
        gradients = Gradients(torch.zeros_like(operands.x), y_grad, attn_grad, None)
        attend_grad(block, how, operands, grad, stats, gradients)
    return start.since()
