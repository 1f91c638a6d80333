"""Optimizers of distributed embeddings: only the rows that some worker used are updated."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sar.comm import session
from sar.errors import ConfigError
from sar.nn.embedding import DistEmbedding

State = dict[str, Any]


class SparseOptimizer(torch.optim.Optimizer):
    """What `SparseAdam` and `SparseAdagrad` share: `step` and `zero_grad` as torch's, called by all workers together.

    Gradients are summed over workers, as `gather_grads` does, so divide the loss by the global count. A row is used
    where `emb(node_ids)` has looked it up on any worker and a backward came back to it; `emb()` uses all. An embedding
    that no worker has used stays as it is, and its steps are not counted. Learning rate schedulers work as ever.
    `GradScaler.step` is a collective call, too: where a row's gradient overflows, all workers skip the step.

    Args:
        embeddings: what to update; the same on all workers, in the same order.
        defaults: settings by name.
    """

    grad_scale: Tensor | None  # set by `GradScaler.step` while it calls `step`, as is found_inf
    found_inf: Tensor
    row_state: ClassVar[tuple[str, ...]]
    """What the state has for every row, (N_i, D) each."""

    def __init__(self, embeddings: Iterable[DistEmbedding], defaults: dict[str, Any]) -> None:
        self.embeddings = list(embeddings)
        if not all(isinstance(emb, DistEmbedding) for emb in self.embeddings):
            raise ConfigError(
                f"{type(self).__name__} got {[type(emb).__name__ for emb in self.embeddings]}; expected a list of "
                "DistEmbedding. Other parameters belong in an optimizer of torch."
            )
        for name, value in defaults.items():
            if name == "betas" and not all(0 <= beta < 1 for beta in value):
                raise ConfigError(f"betas is {value}; expected two numbers from 0 to below 1.")
            if name != "betas" and not value >= 0:
                raise ConfigError(f"{name} is {value}; expected a number of at least 0.")
        weights = [emb.weight for emb in self.embeddings]
        # A parameter whose gradient tells the scaler of overflows on other workers.
        self._overflow = torch.zeros((), device=weights[0].device if weights else None, requires_grad=True)
        super().__init__([*weights, self._overflow], defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all backwards so far, and which rows were used; not a collective call."""
        for emb in self.embeddings:
            emb.forget_gradients()
        self._overflow.grad = None

    @torch.no_grad()
    def gather_grads(self) -> None:
        """Sum the gradients over workers now, into a sparse `weight.grad` of the rows' owners; a collective call.

        Needed before `GradScaler.unscale_`; `step` and `GradScaler.step` make it themselves.
        """
        group, finite = session.current_group(), True
        for emb in self.embeddings:
            found = emb.sum_gradients()
            emb.forget_gradients()
            if found is not None:
                rows, grads = found
                emb.weight.grad = torch.sparse_coo_tensor(
                    rows.unsqueeze(0), grads, emb.weight.shape, is_coalesced=True, check_invariants=False
                )
                finite &= bool(grads.isfinite().all())
        with group.guard():
            overflow = any(group.agree("gradients of embeddings, with overflows", not finite))
        self._overflow.grad = torch.full_like(self._overflow, torch.inf if overflow else 0.0)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `GradScaler.step` asks for just before it looks at the gradients: here they are summed for it."""
        self._summed_late = self._overflow.grad is None
        self.gather_grads()
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over workers and update the rows that were used; a collective call.

        Args:
            closure: evaluates the model anew and returns the loss.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._scale()
        for emb in self.embeddings if scale else []:
            found = emb.sum_gradients()
            if found is None:
                continue
            [group] = self.param_groups
            state = self.state_of(emb.weight)
            state["step"] += 1
            rows, grads = found
            self._update(emb.weight, rows, grads if scale == 1 else grads / scale, state, group)
        return loss

    def _scale(self) -> float:
        """By how much the gradients are too great, where a `GradScaler` has said so; 0 for an overflow."""
        if not hasattr(self, "found_inf"):
            return 1.0
        if self.grad_scale is None and self._summed_late:
            raise ConfigError(
                "GradScaler.unscale_ saw no sums over workers; call gather_grads() of the optimizer before."
            )
        if self.found_inf:
            return 0.0
        return 1.0 if self.grad_scale is None else float(self.grad_scale)

    def state_of(self, weight: Tensor) -> State:
        """The state of an embedding's rows, which is made if there is none yet."""
        [group] = self.param_groups
        state: State = self.state[weight]
        if not state:
            state |= {"step": 0} | {name: self._initial(name, weight, group) for name in self.row_state}
        return state

    def _initial(self, name: str, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return torch.zeros_like(weight, requires_grad=False)

    @abstractmethod
    def _update(self, weight: Tensor, rows: Tensor, grads: Tensor, state: State, group: dict[str, Any]) -> None:
        """Change `rows`, (U,), of the weight, (N_i, D), and of the state by their gradients, (U, D)."""


class SparseAdam(SparseOptimizer):
    """Adam for the rows in use, as `torch.optim.SparseAdam`: moments of the others do not decay.

    Args:
        embeddings: a list of `DistEmbedding`.
        lr: learning rate. Default 1e-3.
        betas: decay of the first and of the second moment. Default (0.9, 0.999).
        eps: added to the root of the second. Default 1e-8.
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
    """Adagrad for the rows in use, as `torch.optim.Adagrad` with sparse gradients.

    Args:
        embeddings: a list of `DistEmbedding`.
        lr: learning rate. Default 1e-2.
        lr_decay: in step t the rate is lr / (1 + (t - 1) lr_decay). Default 0.
        initial_accumulator_value: what sums of squares begin with. Default 0.
        eps: added to the root of the sum. Default 1e-10.
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

    def _initial(self, name: str, weight: Tensor, group: dict[str, Any]) -> Tensor:
        return torch.full_like(weight, group["initial_accumulator_value"], requires_grad=False)

    def _update(self, weight: Tensor, rows: Tensor, grads: Tensor, state: State, group: dict[str, Any]) -> None:
        total = state["sum"][rows].addcmul_(grads, grads)
        state["sum"][rows] = total
        rate = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        weight.index_add_(0, rows, grads / total.sqrt_().add_(group["eps"]), alpha=-rate)
