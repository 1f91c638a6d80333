"""What belongs to a worker but lives in its process: swapped with the turn, or refused."""

import copy
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

import torch
from numpy.random import mtrand
from torch.nn.parallel import DistributedDataParallel

from sar.comm import calls
from sar.comm.statistics import counters
from sar.comm.virtual.turns import Swapped
from sar.config import Config
from sar.errors import ConfigError


def _take_settings() -> dict[str, Any]:
    return {name: getattr(Config, name) for name in Config.__annotations__}


def _put_settings(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(Config, name, value)


def _take_warnings() -> dict[str, Any]:
    """What `warnings.catch_warnings` changes."""
    names = "filters", "showwarning", "_showwarnmsg_impl"
    return {name: vars(warnings)[name] for name in names if name in vars(warnings)}


def _put_warnings(attributes: dict[str, Any]) -> None:
    if warnings.filters is not attributes["filters"]:
        vars(warnings)["filters"] = []
        warnings.resetwarnings()  # which also lets go of what was decided by the filters of another worker
    vars(warnings).update(attributes)


def _put_copy(generator: Any) -> None:
    mtrand.set_bit_generator(copy.deepcopy(generator))


def _put_arguments(arguments: list[str]) -> None:
    sys.argv[:] = arguments


def _put_streams(streams: tuple[TextIO, TextIO]) -> None:
    sys.stdout, sys.stderr = streams


def _take_anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _put_listeners(listeners: list[calls.Listener]) -> None:
    calls.listeners[:] = listeners


STATE: Final = (
    Swapped(torch.get_rng_state, torch.set_rng_state),
    Swapped(mtrand.get_bit_generator, mtrand.set_bit_generator, _put_copy),  # its state takes 0.2 ms to swap
    Swapped(random.getstate, random.setstate),
    Swapped(torch.get_default_dtype, torch.set_default_dtype),
    Swapped(_take_settings, _put_settings),
    Swapped(_take_warnings, _put_warnings),
    Swapped(lambda: dict(vars(counters)), vars(counters).update),
    Swapped(lambda: list(calls.listeners), _put_listeners),
    Swapped(lambda: sys.modules["__main__"], lambda main: sys.modules.update({"__main__": main})),
    Swapped(lambda: list(sys.argv), _put_arguments),
    Swapped(os.getcwd, os.chdir),
    Swapped(lambda: (sys.stdout, sys.stderr), _put_streams),
    Swapped(_take_anomaly_mode, lambda mode: torch.set_anomaly_enabled(*mode)),
)


@contextmanager
def refusals() -> Iterator[None]:
    """Refuse inside what cannot work among virtual workers."""
    whole = {(torch, "compile"): torch.compile, (DistributedDataParallel, "__init__"): DistributedDataParallel.__init__}
    for (owner, name), refused in whole.items():
        setattr(owner, name, _refuse(f"{refused.__module__}.{refused.__qualname__}".removesuffix(".__init__")))
    try:
        yield
    finally:
        for (owner, name), before in whole.items():
            setattr(owner, name, before)


def _refuse(what: str) -> Callable[..., Any]:
    advice = {
        "torch.compile": "compiled code keeps tensors that have to leave memory. Leave it out",
    }.get(what, "it sums over processes. Use sar.gather_grads")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{what} cannot run in virtual workers (SAR_RESIDENT): {advice}, or start a process for each."
        )

    return refuse
