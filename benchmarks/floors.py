"""Lower bounds of an epoch's time: only the dense layers, and only the aggregations, without communication."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.models import HEADS, Exchanged, Model
from sar.core.relation import Relation
from sar.kernels import EdgeMessage, EdgeOperand, Op, Target, aggregate_grad, aggregate_sum
from sar.kernels.attention import attend, attend_grad, destination_statistics, note_scores
from sar.kernels.ops import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score

SLOPE = 0.2  # of GATConv's leaky ReLU


def dense_time(model: Model, x: Tensor, labels: Tensor, train: Tensor) -> float:
    """Seconds of one training step of the layers without message passing, on the worker's own rows."""
    optimizer = torch.optim.Adam(model.parameters())
    start = time.perf_counter()
    loss = functional.cross_entropy(model.dense(x)[train], labels[train], reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start


def aggregation_time(relation: Relation, layers: Sequence[Exchanged]) -> float:
    """Seconds of one epoch's kernels, forward and backward, on random local rows."""
    return sum(_attention(relation, layer) if layer.values_read else _sum(relation, layer) for layer in layers)


def _sum(relation: Relation, layer: Exchanged) -> float:
    columns = layer.columns
    sources = [torch.rand(block.num_src, columns) for block in relation.blocks]
    out, grad = torch.zeros(relation.num_dst, columns), torch.rand(relation.num_dst, columns)
    start = time.perf_counter()
    for block, rows in zip(relation.blocks, sources, strict=True):
        aggregate_sum(block, EdgeMessage(Op.COPY, EdgeOperand.of(rows, Target.U)), out)
    for block in () if layer.constant else relation.blocks:
        copy = EdgeMessage(Op.COPY, EdgeOperand(None, Target.U, (columns,)))
        aggregate_grad(block, copy, "lhs", EdgeOperand.of(grad, Target.V), torch.zeros(block.num_src, columns))
    return time.perf_counter() - start


def _attention(relation: Relation, layer: Exchanged) -> float:
    shape, how = (HEADS, layer.columns // HEADS), Attention(Score.ADDITIVE, SLOPE)
    attn, grad = torch.rand(shape), torch.rand(relation.num_dst, *shape)
    y = torch.rand(relation.num_dst, HEADS)
    ends = [AttentionOperands(torch.rand(block.num_src, *shape), y, attn, None) for block in relation.blocks]
    start = time.perf_counter()
    running = OnlineSoftmaxState.start(relation.num_dst, grad)
    for block, operands in zip(relation.blocks, ends, strict=True):
        attend(block, how, operands, running)
    out, normaliser = running.finish(relation.in_degrees)
    stats = destination_statistics(how, normaliser, grad, out)
    note_scores(how, stats, y)
    y_grad, attn_grad = torch.zeros_like(y), torch.zeros_like(attn)
    for block, operands in zip(relation.blocks, ends, strict=True):
        gradients = Gradients(torch.zeros_like(operands.x), y_grad, attn_grad, None)
        attend_grad(block, how, operands, grad, stats, gradients)
    return time.perf_counter() - start
