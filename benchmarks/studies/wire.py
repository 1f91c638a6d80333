"""Test accuracy with features and gradients rounded on the wire: `python -m benchmarks.studies wire`."""

import argparse
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

import sar
from benchmarks import command
from benchmarks.graphs import featured_graph
from benchmarks.report import describe_setting, write_section
from benchmarks.results import setting
from sar.cli.demo import MODELS, train
from sar.host.processes import run_workers
from sar.partition.in_memory import divide
from sar.partition.inspect.text_tables import as_markdown, as_text


class Wire(NamedTuple):
    """What travels rounded: `Config.wire_dtype_features` and `Config.wire_dtype_gradients`, by name."""

    features: str | None
    gradients: str | None


EXACT = "exact"
WIRES = {
    EXACT: Wire(None, None),
    "bfloat16 features": Wire("bfloat16", None),
    "bfloat16 both": Wire("bfloat16", "bfloat16"),
}


def main(argv: Sequence[str]) -> None:
    """Train every model with every wire and seed, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies wire", description=__doc__)
    command.add_paths(parser)
    parser.add_argument(
        "--graphs", nargs="+", default=["cora", "amazon_computers"], metavar="NAME", help="(%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=4, metavar="W", help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="trainings of each (%(default)s)")
    parser.add_argument("--epochs", type=int, default=60, metavar="N", help="(%(default)s)")
    parser.add_argument("--time-limit", type=float, default=1800, metavar="S", help="for one graph (%(default)s)")
    arguments = parser.parse_args(argv)
    rows: list[tuple[str, ...]] = [("graph", "model", *WIRES)]
    with command.work_directory(arguments.work) as work:
        for name in arguments.graphs:
            accuracies = _train_all(arguments, name, work)
            for model in MODELS:
                exact = accuracies[model, EXACT]
                rows.append((Path(name).stem, model, *(cell(accuracies[model, wire], exact) for wire in WIRES)))
    print(f"\n{as_text(rows)}")
    words = f"{arguments.workers} workers, {arguments.epochs} epochs, {arguments.seeds} seeds"
    conditions = setting(command.shown("benchmarks.studies", ["wire", *argv]), {"training": words})
    write_section(arguments.docs / "benchmarks.md", "wire", f"{describe_setting(conditions)}\n\n{as_markdown(rows)}")


def cell(accuracies: Sequence[float], exact: Sequence[float]) -> str:
    """As `0.8120 ± 0.0040, -0.0010`: mean, deviation between seeds, and mean difference to exact with the same seed."""
    deviation = stdev(accuracies) if len(accuracies) > 1 else 0.0
    mean = f"{fmean(accuracies):.4f} ± {deviation:.4f}"
    return mean if accuracies is exact else f"{mean}, {fmean(accuracies) - fmean(exact):+.4f}"


def train_all(
    report: Callable[[Any], None], arguments: argparse.Namespace, partition_json: Path, parameters: Path
) -> dict[tuple[str, str], list[float]]:
    """Train every model with every seed and wire in this worker, one after the other; accuracies by model and wire."""
    accuracies: dict[tuple[str, str], list[float]] = {}
    for seed, model, name in itertools.product(range(arguments.seeds), MODELS, WIRES):
        sar.Config.wire_dtype_features, sar.Config.wire_dtype_gradients = map(_dtype, WIRES[name])
        job = argparse.Namespace(epochs=arguments.epochs, lr=0.01, seed=seed, device="cpu")
        run = train(lambda _: None, job, model, partition_json, parameters)
        accuracies.setdefault((model, name), []).append(run.test_accuracy)
        if sar.rank() == 0:
            report(f"{model}, seed {seed}, {name}: accuracy {run.test_accuracy:.4f}")
    return accuracies


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _train_all(arguments: argparse.Namespace, name: str, work: Path) -> dict[tuple[str, str], list[float]]:
    """Partition a graph and train on it in worker processes."""
    data = featured_graph(name, arguments.data)
    folder = work / f"wire-{Path(name).stem}-{arguments.workers}"
    shutil.rmtree(folder, ignore_errors=True)
    partitions = divide(data, folder, "graph", arguments.workers).json_file
    everybodys = run_workers(
        train_all,
        arguments,
        partitions,
        folder / "parameters.pt",
        n_workers=arguments.workers,
        n_threads=1,
        time_limit=arguments.time_limit,
        on_progress=lambda line: print(f"{Path(name).stem} {line}", flush=True),
    )
    accuracies: dict[tuple[str, str], list[float]] = everybodys[0]
    return accuracies
