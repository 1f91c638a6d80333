"""Raw results: what was measured, on what, and their JSON file."""

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.measure import Construction, Measurement, Traffic
from sar.errors import ConfigError

T = TypeVar("T")

SINGLE = 0
"""In place of a number of workers: one process of plain DGL."""


@dataclass(frozen=True)
class Run:
    """One training run; of several with the same model, workers and mode, `repeat` counts from 0.

    processes: by rank; one for `SINGLE`, whose mode is 0.
    """

    model: str
    workers: int
    mode: int
    repeat: int
    processes: list[Measurement]


@dataclass(frozen=True)
class Results:
    """All runs on one graph.

    edges: with self-loops.
    setting: what else the numbers depend on, in words.
    """

    graph: str
    nodes: int
    edges: int
    features: int
    classes: int
    setting: dict[str, str]
    runs: list[Run] = field(default_factory=list)

    def find(self, model: str, workers: int, mode: int = 0) -> list[Run]:
        """The runs of one row, by repeat."""
        row = (model, workers, mode)
        return [run for run in self.runs if (run.model, run.workers, run.mode) == row]

    def models(self) -> list[str]:
        """The models measured."""
        return list(dict.fromkeys(run.model for run in self.runs))

    def rows(self, model: str) -> list[tuple[int, int]]:
        """Workers and modes that a model was measured with, `SINGLE` left out."""
        return sorted({(run.workers, run.mode) for run in self.runs if run.model == model and run.workers != SINGLE})


def setting(command: str, options: Mapping[str, str]) -> dict[str, str]:
    """What the numbers depend on: command, options, machine, versions and day."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("dgl", "numba", "numpy"))
    return {
        "command": command,
        **options,
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB memory",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, {packages}, "
        f"{' '.join(platform.libc_ver())}",
        "date": date.today().isoformat(),
    }


def save(results: Any, file: Path) -> None:
    """Write results, what JSON knows and dataclasses, as JSON."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, default=asdict))
    unfinished.rename(file)


def read(file: Path, make: Callable[[Any], T]) -> T:
    """What `make` makes of the JSON that `save` wrote.

    Raises:
        ConfigError: the file is missing or holds something else.
    """
    try:
        return make(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"'{file}' holds no results of this benchmark: {error!r}") from error


def load(file: Path) -> list[Results]:
    """Read a list of `Results`, as `read` does."""
    return read(file, lambda content: [_results(one) for one in content])


def _results(one: dict[str, Any]) -> Results:
    runs = [Run(**run | {"processes": [_measurement(process) for process in run["processes"]]}) for run in one["runs"]]
    return Results(**one | {"runs": runs})


def _measurement(process: dict[str, Any]) -> Measurement:
    parts = {key: process[key] and kind(**process[key]) for key, kind in PARTS.items()}
    return Measurement(**process | parts)


PARTS = {"construction": Construction, "traffic": Traffic}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
