"""`sar plan`: memory and traffic of training a model on a partition directory, before it is trained."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sar.adapters.dgl.models import KINDS, LayerStack
from sar.adapters.dgl.patched_layers import patch_dgl
from sar.adapters.dgl.shim import has_dgl
from sar.cli.graph_input import parse_bytes
from sar.cli.model_file import load_model
from sar.errors import ConfigError
from sar.host.memory import PeakMemory, machine_memory
from sar.kernels import load_kernels
from sar.partition.inspect.text_tables import as_text, mega, of_limit
from sar.train.counted_graph import count_graph
from sar.train.plan import WorkerPlan, fewest_workers, plan_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sar plan`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    add(
        "--model",
        default="sage",
        metavar="MODEL",
        help="sage, gcn or gat, or FILE.py:FUNCTION, which returns a module when called with the graph's types and "
        "widths (sar.train.counted_graph.GraphInfo) (%(default)s)",
    )
    add("--layers", type=int, default=3, metavar="L", help="of sage, gcn and gat (%(default)s)")
    add("--hidden", type=int, default=256, metavar="D", help="their width, of gat of all heads together (%(default)s)")
    add("--heads", type=int, default=4, metavar="H", help="of gat (%(default)s)")
    add("--features", type=int, metavar="F", help="input width; default: that of the feature 'feat'")
    add("--classes", type=int, metavar="C", help="default: one more than the greatest 'label'")
    add("--workers", type=int, metavar="W", help="to plan for; default: one for each part")
    memory = "memory of a worker, such as 8GiB, to be told how many workers fit; default: all share this machine"
    add("--memory-per-worker", type=parse_bytes, metavar="SIZE", help=memory)
    add("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and return 0."""
    kind, heads, memory = arguments.model, arguments.heads, arguments.memory_per_worker
    if arguments.layers < 1:
        raise ConfigError(f"--layers {arguments.layers}: expected at least 1.")
    make_model = None if kind in KINDS else load_model(kind, f"one of {', '.join(KINDS)}, or FILE.py:FUNCTION")
    if has_dgl():
        patch_dgl()
    load_kernels()
    torch.optim.Adam([torch.zeros(1)])  # the first optimizer loads more of torch
    code = PeakMemory().baseline  # of this process before it reads a graph, as of a worker
    print(f"sar plan: reading {arguments.directory}", file=sys.stderr)
    counts = count_graph(
        arguments.directory, workers=arguments.workers, in_width=arguments.features, num_classes=arguments.classes
    )
    info, described, title = counts.info, {"source": kind}, kind
    if make_model is None:
        if len(info.ntypes) > 1 or len(info.canonical_etypes) > 1:
            raise ConfigError(
                f"the graph has {len(info.ntypes)} node types and {len(info.canonical_etypes)} edge types, but {kind} "
                "is for one of each; plan a model of your own: --model FILE.py:FUNCTION."
            )
        hidden = [arguments.hidden] * (arguments.layers - 1)
        widths = [info.in_widths[info.ntypes[0]], *hidden, info.num_classes]
        described = {"kind": kind, "widths": widths, "heads": heads}
        title = f"{kind}, widths {' -> '.join(map(str, widths))}"
    workers = plan_training(counts, make_model or (lambda _: LayerStack(kind, widths, heads)), code)
    if arguments.json:
        plans = [
            asdict(worker) | {"memory": asdict(worker.memory) | {"total": worker.memory.total}} for worker in workers
        ]
        found: dict[str, Any] = {"model": described, "workers": plans}
        if memory is not None:
            found |= {"memory_per_worker": memory, "fewest_workers": fewest_workers(workers, memory)}
        print(json.dumps(found))
        return 0
    print(f"{title}, on {_count(len(workers))} in mode 1. Sizes in MB of a million bytes.\n")
    print(f"{_tables(workers)}\n\n{_advice(workers, memory)}")
    return 0


def _tables(workers: Sequence[WorkerPlan]) -> str:
    """Bytes sent for each layer, by the worker that sends most; and traffic and memory of all workers."""
    most = max(workers, key=lambda worker: worker.bytes_sent)
    layers: list[tuple[str, ...]] = [("layer", "distributed call", "forward", "backward")]
    layers += [(call.layer, call.operation, mega(call.forward), mega(call.backward)) for call in most.calls]
    layers.append(("gradients of parameters", "gather_grads", "", mega(most.parameters_sent)))
    uses = list(asdict(most.memory))
    each: list[tuple[str, ...]] = [("worker", "sent", "memory", *uses)]
    for rank, worker in enumerate(workers):
        sizes = (worker.bytes_sent, worker.memory.total, *(getattr(worker.memory, use) for use in uses))
        each.append((str(rank), *map(mega, sizes)))
    return (
        f"Sent in an epoch, by the worker that sends most\n{as_text(layers)}\n\n"
        "Sent in an epoch, and resident memory at the peak of training with its uses beside it\n"
        + as_text(each, left=1)
    )


def _advice(workers: Sequence[WorkerPlan], memory: int | None) -> str:
    """What to choose: whether the workers fit, and how many would."""
    largest, fixed = (max(getattr(worker.memory, size) for worker in workers) for size in ("total", "fixed"))
    if memory is None:
        together, here = sum(worker.memory.total for worker in workers), machine_memory()
        return (
            f"All workers together take {mega(together)} MB of this machine's {mega(here)} MB, so they "
            f"{'fit' if together <= here else 'do not fit'}. --memory-per-worker SIZE tells how many workers of "
            "another size fit."
        )
    fits, fewest = of_limit(memory), fewest_workers(workers, memory)
    if fewest is None:
        return (
            f"No number of workers fits {fits} each: code, parameters and buffers alone take {mega(fixed)} MB. Allow "
            "more memory, or make the model smaller."
        )
    takes = f"{fits} each: the largest takes {mega(largest)} MB"
    if largest <= memory:
        fewer = f" With the same balance and halo, {fewest} would fit, too." if fewest < len(workers) else ""
        return f"{_count(len(workers))} fit {takes}. Choose {len(workers)}.{fewer}"
    return (
        f"{_count(len(workers))} do not fit {takes}. Choose {fewest}, the fewest that fit with the same balance and "
        "halo; or fewer processes that hold one partition in memory at a time (sar launch --resident 1)."
    )


def _count(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"
