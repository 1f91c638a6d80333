"""State of the process that each worker needs for itself: swapped with the turn, or refused if it cannot be swapped."""

import atexit
import copy
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, setitem
from typing import Any, Final

import torch
import torch.autograd.profiler as profiler
from numpy.random import mtrand
from torch.nn.parallel import DistributedDataParallel

from sar.comm.statistics import counters, listeners
from sar.config import Config
from sar.errors import ConfigError
from sar.outofcore.turns import Swapped


def _attributes(owner: object, *names: str) -> Swapped:
    """Several attributes of an object or module."""
    return Swapped(
        lambda: attrgetter(*names)(owner), lambda values: vars(owner).update(zip(names, values, strict=True))
    )


def _put_warnings(attributes: dict[str, Any]) -> None:
    if warnings.filters is not attributes["filters"]:
        vars(warnings)["filters"] = []
        warnings.resetwarnings()  # also drops the cache of decisions by another worker's filters
    vars(warnings).update(attributes)


_WARNINGS: Final = {"filters", "showwarning", "_showwarnmsg_impl"} & vars(warnings).keys()
"""The attributes of the module `warnings` that `catch_warnings` changes."""
_ALL: Final = slice(None)

STATE: Final = (
    Swapped(torch.get_rng_state, torch.set_rng_state),
    # The generator, because its state takes 0.2 ms to swap.
    Swapped(mtrand.get_bit_generator, mtrand.set_bit_generator, lambda g: mtrand.set_bit_generator(copy.deepcopy(g))),
    Swapped(random.getstate, random.setstate),
    Swapped(torch.get_default_dtype, torch.set_default_dtype),
    _attributes(Config, *Config.__annotations__),
    Swapped(lambda: {name: vars(warnings)[name] for name in _WARNINGS}, _put_warnings),
    Swapped(lambda: dict(vars(counters)), vars(counters).update),
    Swapped(lambda: list(listeners), partial(setitem, listeners, _ALL)),
    Swapped(lambda: sys.modules["__main__"], lambda main: sys.modules.update({"__main__": main})),
    Swapped(lambda: list(sys.argv), lambda arguments: setitem(sys.argv, _ALL, arguments)),
    Swapped(os.getcwd, os.chdir),
    _attributes(sys, "stdout", "stderr"),
    Swapped(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda mode: torch.set_anomaly_enabled(*mode),
    ),
)


_REFUSED: Final = (
    (torch, "compile", "torch.compile", "it keeps tensors in memory that have to leave it. Leave it out"),
    (DistributedDataParallel, "__init__", "DistributedDataParallel", "it sums over processes. Use sar.gather_grads"),
    (profiler.profile, "__init__", "torch.profiler", "it looks at a whole process. Use sar.profile"),
    (signal, "signal", "signal.signal", "a process has one handler, in its main thread. Leave it out"),
)


@contextmanager
def refusals() -> Iterator[None]:
    """Context that refuses features which cannot work in a shared process, and makes `atexit` local to a worker."""
    changes: list[tuple[Any, str, Any]] = [
        (owner, name, partial(_refuse, what, why)) for owner, name, what, why in _REFUSED
    ]
    changes += [(atexit, "register", _register), (atexit, "unregister", _unregister)]
    whole = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, instead in changes:
        setattr(owner, name, instead)
    try:
        yield
    finally:
        for (owner, name, _), before in zip(changes, whole, strict=True):
            setattr(owner, name, before)


def _refuse(what: str, why: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"{what} cannot run in workers that share a process (SAR_RESIDENT): {why}, or start a process for each."
    )


# -- the end of a worker's script

_exits: Final = threading.local()
_at_exit, _not_at_exit = atexit.register, atexit.unregister


@contextmanager
def exits_of_its_own() -> Iterator[None]:
    """Context whose end runs the functions that the script inside registered with `atexit`, the latest first."""
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    _exits.calls = calls
    try:
        yield
    finally:
        while calls:
            function, args, kwargs = calls.pop()
            function(*args, **kwargs)


def _register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Stand-in for `atexit.register`. Functions that a module registers, not the script, run with the process's end."""
    if not hasattr(_exits, "calls") or sys._getframe(1).f_globals.get("__name__") != "__main__":
        return _at_exit(function, *args, **kwargs)
    _exits.calls.append((function, args, kwargs))
    return function


def _unregister(function: Callable[..., Any]) -> None:
    if hasattr(_exits, "calls"):
        _exits.calls[:] = [call for call in _exits.calls if call[0] != function]
    _not_at_exit(function)
