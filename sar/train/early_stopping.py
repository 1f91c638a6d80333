"""`sar.EarlyStopping`: all workers stop in the same step, and the best model is kept."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sar.comm import session
from sar.common_tuples import StrPath
from sar.errors import ConfigError, DisagreementError
from sar.train.checkpoint import copied_state, save_model


class EarlyStopping:
    """Stops training when a monitored value has stopped improving, and keeps the best model.

    The best model is kept in CPU memory, without the rows of a `DistEmbedding`.

    Args:
        patience: number of consecutive steps without improvement, at least 1, after which training stops. Default 10.
        mode: "max" if higher values are better, such as accuracy; "min" for losses. Default "max".
        min_delta: minimum improvement. Default 0.
        file: also save each new best model to this file with `save_model`. Default None.

    Attributes:
        best: the best value; None until there is one.

    Raises:
        ConfigError: for invalid arguments.
    """

    def __init__(
        self,
        patience: int = 10,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
        *,
        file: StrPath | None = None,
    ) -> None:
        if patience < 1 or mode not in ("max", "min") or not min_delta >= 0:
            raise ConfigError(
                f"EarlyStopping got patience {patience}, mode {mode!r} and min_delta {min_delta}; expected at least 1, "
                "'max' or 'min', and at least 0."
            )
        self.patience, self.mode, self.min_delta, self.file = patience, mode, min_delta, file
        self.best: float | None = None
        self._waited = 0
        self._model: dict[str, Any] | None = None

    def step(self, value: float | Tensor, model: nn.Module | None = None) -> bool:
        """Record the value of a step, and copy the model if it is the best so far. A collective call.

        Args:
            value: the monitored value, the same on all workers, such as `task.accuracy(logits, "val")`. NaN never
                improves.
            model: the model that `load_best` restores.

        Returns:
            Whether to stop; the same on all workers.

        Raises:
            DisagreementError: the workers' values differ, for example a metric over each worker's own nodes.
            ConfigError: `file` is set, but no model was passed.
            CheckpointError: as in `save_model`.
        """
        if self.file is not None and model is None:
            raise ConfigError(f"There is no model to save as {self.file}: pass it to step(value, model).")
        with session.current_group().guard() as group:
            call = "EarlyStopping.step"
            group.agree(call)
            own = torch.tensor(float(value), dtype=torch.float64, device="cpu")
            values = [float(theirs) for theirs in group.all_gather(own, call)]
            if len(set(values)) > 1 and not all(map(math.isnan, values)):
                raise DisagreementError(
                    f"{call} got different values on the workers: {values}. Is it a metric of each worker's own nodes? "
                    "Give the one over all workers: task.accuracy or task.metrics, or sar.all_sum of sums and counts."
                )
        found, self._waited = values[0], self._waited + 1
        gain = math.inf if self.best is None else found - self.best if self.mode == "max" else self.best - found
        if gain > self.min_delta and not math.isnan(found):
            self.best, self._waited = found, 0
            self._model = None if model is None else copied_state(model)
            if self.file is not None and model is not None:
                save_model(self.file, model)
        return self._waited >= self.patience

    def load_best(self, model: nn.Module) -> None:
        """Load the parameters and buffers of the best step into a model. A collective call.

        Raises:
            ConfigError: no model was kept.
        """
        with session.current_group().guard() as group:
            group.agree("EarlyStopping.load_best")
            if self._model is None:
                raise ConfigError("No model is kept: pass it to step(value, model), with a value that is not NaN.")
            model.load_state_dict(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, including the best model, for `save_checkpoint(..., loaders=stop)` or `extra`."""
        return {"best": self.best, "waited": self._waited, "model": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`. Not a collective call."""
        self.best, self._waited, self._model = state["best"], state["waited"], state["model"]
