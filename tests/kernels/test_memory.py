"""The kernels in plain torch make nothing of the size of edges x features, however many edges there are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sar.kernels import EdgeBlock, EdgeOperand, Target, aggregate_cmp, aggregate_grad, aggregate_sum
from sar.kernels.attention import attend, attend_grad, destination_statistics, note_scores
from sar.kernels.ops import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score
from tests.kernels import oracle

pytestmark = [
    pytest.mark.usefixtures("plain_torch", "num_threads"),
    pytest.mark.parametrize("num_threads", [1], indirect=True),  # small operations: threads would wait
]

NODES, EDGES, HEADS, DIM = 20, 400, 2, 16
BOUND = EDGES * (HEADS + 2)
"""Elements; edges x features are eight times as many, rows of nodes and chunks fewer."""


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor has that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, storage)
        return made


@pytest.fixture
def block() -> EdgeBlock:
    """Many edges between few nodes."""
    src, dst = torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))
    return EdgeBlock.from_coo(src, dst.sort().values, NODES, NODES)


def largest(run: Callable[[], None]) -> int:
    """Elements of the largest tensor that a run makes."""
    with LargestTensor() as record:
        run()
    return record.elements


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("score", Score)
def test_attention_forward_and_backward(block: EdgeBlock, score: Score, weighted: bool) -> None:
    how = Attention(score, 0.2, dropout=0.3 if weighted else 0.0, seed=7)
    y = torch.randn(NODES, HEADS) if score is Score.ADDITIVE else torch.randn(NODES, HEADS, DIM)
    attn = None if score is Score.DOT else torch.randn(HEADS, DIM)
    ends = AttentionOperands(torch.randn(NODES, HEADS, DIM), y, attn, torch.rand(EDGES) if weighted else None)
    grads = Gradients(*(None if operand is None else torch.zeros_like(operand) for operand in ends))

    def forward_and_backward() -> None:
        running = OnlineSoftmaxState.start(NODES, ends.x)
        attend(block, how, ends, running)
        out, normaliser = running.finish(torch.ones(NODES))
        stats = destination_statistics(how, normaliser, out, out)
        note_scores(how, stats, ends.y)
        attend_grad(block, how, ends, out, stats, grads)

    assert largest(forward_and_backward) <= BOUND
    assert grads.x.abs().sum() > 0


def test_aggregation_forward_and_backward(block: EdgeBlock) -> None:
    x, weight = torch.randn(NODES, HEADS, DIM), torch.rand(EDGES, HEADS, 1)
    total, best = torch.zeros_like(x), torch.full_like(x, -torch.inf)
    arg, x_grad = torch.full(x.shape, -1, dtype=torch.int32), torch.zeros_like(x)
    message = oracle.message("mul", x, Target.U, weight, Target.E)

    def forward_and_backward() -> None:
        aggregate_sum(block, message, total)
        aggregate_cmp(block, message, best, arg, largest=True)
        for edge_ids in (None, arg):
            aggregate_grad(block, message, "lhs", EdgeOperand.of(total, Target.V), x_grad, arg=edge_ids)

    assert largest(forward_and_backward) <= BOUND
    assert x_grad.abs().sum() > 0
