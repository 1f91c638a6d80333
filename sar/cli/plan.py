"""`sar plan`: predicts memory and traffic of training a model on a partition directory."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from sar.adapters.dgl.models import KINDS, LayerStack
from sar.adapters.dgl.patched_layers import patch_dgl
from sar.adapters.dgl.shim import has_dgl
from sar.cli.model_file import load_model
from sar.data.partition_json import read_partition_json
from sar.errors import ConfigError
from sar.host.memory import PeakMemory, anonymous_memory, machine_memory
from sar.kernels import load_kernels
from sar.outofcore.disk_speed import DiskSpeed
from sar.partition.inspect.text_tables import as_text, mega, of_limit
from sar.train.counted_graph import count_graph
from sar.train.plan import WorkerPlan, plan_training
from sar.train.plan_out_of_core import OutOfCorePlan, plan_out_of_core


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and return 0."""
    kind, heads, memory = arguments.model, arguments.heads, arguments.memory
    if arguments.layers < 1:
        raise ConfigError(f"--layers {arguments.layers}: expected at least 1.")
    make_model = None if kind in KINDS else load_model(kind, f"one of {', '.join(KINDS)}, or FILE.py:FUNCTION")
    if has_dgl():
        patch_dgl()
    load_kernels()
    torch.optim.Adam([torch.zeros(1)])  # the first optimizer loads more of torch
    code = PeakMemory().baseline  # of this process before it reads a graph, like a worker's
    own_code = anonymous_memory()
    spec = read_partition_json(arguments.directory)
    if spec.counts is None:
        print(f"sar plan: reading all graphs of {spec.path.parent}, as {spec.path.name} has no counts", file=sys.stderr)
    counts = count_graph(arguments.directory, in_width=arguments.features, num_classes=arguments.classes)
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
    make_model = make_model or (lambda _: LayerStack(kind, widths, heads))
    if memory is not None:
        plan = plan_out_of_core(counts, make_model, own_code, memory)
        speed = DiskSpeed.measure(arguments.spill or spec.path.parent)
        if arguments.json:
            disk = {"bytes_written_per_second": speed.written, "bytes_read_per_second": speed.read}
            print(json.dumps({"model": described, "memory": memory, "plan": asdict(plan), "disk": disk}))
        else:
            print(f"{title}. {_out_of_core(plan, counts.num_workers, memory, speed)}")
        return 0
    workers = plan_training(counts, make_model, code)
    if arguments.json:
        plans = [
            asdict(worker) | {"memory": asdict(worker.memory) | {"total": worker.memory.total}} for worker in workers
        ]
        print(json.dumps({"model": described, "workers": plans}))
        return 0
    print(f"{title}, on {_count(len(workers))} in mode 1. Sizes in MB of a million bytes.\n")
    together, here = sum(worker.memory.total for worker in workers), machine_memory()
    print(
        f"{_tables(workers)}\n\n"
        f"All workers together take {mega(together)} MB of this machine's {mega(here)} MB, so they "
        f"{'fit' if together <= here else 'do not fit. --memory SIZE plans for one partition in memory at a time'}."
    )
    return 0


def _tables(workers: Sequence[WorkerPlan]) -> str:
    """Format bytes sent per layer, by the worker that sends most, and traffic and memory of all workers."""
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
        "Sent in an epoch, and peak resident memory of training by use\n" + as_text(each, left=1)
    )


def _out_of_core(plan: OutOfCorePlan, number: int, memory: int, speed: DiskSpeed) -> str:
    """Format the number of partitions that fits, and the disk traffic of an epoch with the existing partitions."""
    fits = of_limit(memory)
    if not plan.partitions:
        return (
            f"No number of partitions fits {fits}: code and parameters alone take {mega(plan.fixed)} MB. Allow more "
            "memory, or make the model smaller."
        )
    takes = f"{fits}: one takes {mega(plan.partition)} MB in its turn, and code and parameters {mega(plan.fixed)} MB"
    if plan.partitions > number:
        choice = f"These {number} partitions do not fit {takes}. Divide the graph into {plan.partitions}."
    else:
        fewer = f" With the same balance and halo, {plan.partitions} would do." if plan.partitions < number else ""
        choice = f"These {number} partitions, one in memory at a time, fit {takes}.{fewer}"
    all_read = plan.read + plan.mapped
    read = f"reads {all_read / 1e9:,.1f} GB" if all_read else "reads nothing, as the page cache holds it"
    seconds = plan.written / speed.written + all_read / speed.read
    return (
        f"{choice} An epoch of {number} writes {plan.written / 1e9:,.1f} GB and {read}: {seconds:,.0f} s at the "
        f"disk's {speed.written / 1e9:.1f} and {speed.read / 1e9:.1f} GB/s."
    )


def _count(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"
