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
    """Ends training once a value has not become better for some steps; keeps the model of the best one.

    The copy of the model is in this worker's CPU memory. Rows of a `DistEmbedding` are not in it.

    Args:
        patience: steps in a row without a better value after which to stop, at least 1.
        mode: "max" if higher is better, as of an accuracy; "min" of a loss.
        min_delta: by how much more than this a value has to be better; default 0.
        file: also save the best model there, as `save_model` does, each time there is a better one. Default None.

    Attributes:
        best: the best value; None before there is one.

    Raises:
        ConfigError: for other arguments.
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
        """Take the value of a step, and keep a copy of the model if it is the best; called by all workers together.

        Args:
            value: the same on all workers, such as `task.accuracy(logits, "val")`. NaN is never better.
            model: the model that `load_best` is to bring back.

        Returns:
            Whether to stop; the same on all workers.

        Raises:
            DisagreementError: the workers' values differ, as a metric of each worker's own nodes does.
            ConfigError: there is a file for the best model, but no model.
            CheckpointError: as from `save_model`.
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
        """Give a model the parameters and buffers of the best step; called by all workers together.

        Raises:
            ConfigError: no model is kept.
        """
        with session.current_group().guard() as group:
            group.agree("EarlyStopping.load_best")
            if self._model is None:
                raise ConfigError("No model is kept: pass it to step(value, model), with a value that is not NaN.")
            model.load_state_dict(self._model)

    def state_dict(self) -> dict[str, Any]:
        """All that it knows, the best model included; for `save_checkpoint(..., loaders=stop)`, or `extra`."""
        return {"best": self.best, "waited": self._waited, "model": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; not a collective call."""
        self.best, self._waited, self._model = state["best"], state["waited"], state["model"]
