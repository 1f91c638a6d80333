"""Adam and Adagrad for the rows of `DistEmbedding`s that were used."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from sar.nn.embedding import DistEmbedding, SparseOptimizer, State


class SparseAdam(SparseOptimizer):
    """Adam for rows that were used, like `torch.optim.SparseAdam`: moments of unused rows do not decay.

    Args:
        embeddings: a list of `DistEmbedding`.
        lr: learning rate. Default 1e-3.
        betas: decay rates of the first and second moments. Default (0.9, 0.999).
        eps: added to the square root of the second moment. Default 1e-8.
    """

    row_state = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        embeddings: Iterable[DistEmbedding],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(embeddings, {"lr": lr, "betas": betas, "eps": eps})

    def _update(self, weight: Tensor, rows: Tensor, grads: Tensor, state: State, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        mean = state["exp_avg"][rows].lerp_(grads, 1 - first)
        square = state["exp_avg_sq"][rows].lerp_(grads.square(), 1 - second)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
        rate = group["lr"] * (1 - second ** state["step"]) ** 0.5 / (1 - first ** state["step"])
        weight.index_add_(0, rows, mean / square.sqrt_().add_(group["eps"]), alpha=-rate)


class SparseAdagrad(SparseOptimizer):
    """Adagrad for rows that were used, like `torch.optim.Adagrad` with sparse gradients.

    Args:
        embeddings: a list of `DistEmbedding`.
        lr: learning rate. Default 1e-2.
        lr_decay: the learning rate in step t is lr / (1 + (t - 1) lr_decay). Default 0.
        initial_accumulator_value: initial value of the sums of squares. Default 0.
        eps: added to the square root of the sum. Default 1e-10.
    """

    row_state = ("sum",)

    def __init__(
        self,
        embeddings: Iterable[DistEmbedding],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "initial_accumulator_value": initial_accumulator_value, "eps": eps}
        super().__init__(embeddings, defaults)

    def _update(self, weight: Tensor, rows: Tensor, grads: Tensor, state: State, group: dict[str, Any]) -> None:
        total = state["sum"][rows].addcmul_(grads, grads)
        state["sum"][rows] = total
        rate = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        weight.index_add_(0, rows, grads / total.sqrt_().add_(group["eps"]), alpha=-rate)
