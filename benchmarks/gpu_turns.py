"""Partitions in turns on a GPU that has a quarter of the memory of training at once: a table of `benchmarks.gpu`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command import work_directory
from benchmarks.graphs import GeneratedSize, prepare
from benchmarks.out_of_core import Run, measure
from benchmarks.runs import LOSS_TOLERANCE
from sar.errors import SarError

HEADER = "edges", "model", "partitions", "MB of the device", "s / epoch", "time / at once", "peak memory (MB)"
TIMES = 4
"""As much as the device has is what training at once takes."""


def turns(arguments: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Two rows for each model: at once, and in turns with less memory. The losses have to be the same."""
    with work_directory(arguments.work) as work:
        edges = arguments.turns_edges
        size = GeneratedSize(arguments.nodes or edges // 25, edges, arguments.features)
        graph = prepare("rmat", size, Path(), work, 0)
        epochs = str(arguments.warm_up + arguments.epochs)
        options = "--device", arguments.device, "--epochs", epochs, "--classes", str(graph.num_classes)
        for model in arguments.models:
            at_once = measure(graph.partitions(1), model, 1, work, *options)
            limit = at_once.on_device / TIMES
            limited = "--device-memory", str(limit)
            in_turns = measure(graph.partitions(arguments.parts), model, arguments.parts, work, *options, *limited)
            for run, memory in ((at_once, ""), (in_turns, f"{limit:.0f}")):
                row = (f"{len(graph.data.src):,}", model, str(run.parts), memory, *_costs(run, at_once))
                print("  ".join(row), flush=True)
                yield row


def _costs(run: Run, at_once: Run) -> tuple[str, str, str]:
    for loss, expected in zip(run.losses, at_once.losses, strict=True):
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            raise SarError(
                f"{run.model} in {run.parts} parts: the loss {loss} is not that of training at once, {expected}."
            )
    return f"{run.seconds:.4f}", f"{run.seconds / at_once.seconds:.2f}", f"{run.on_device:.0f}"
