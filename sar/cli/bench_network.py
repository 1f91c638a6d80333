"""`sar bench-network`: how fast the network is, and whether it, the partitioning or compute limits training."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sar import comm
from sar.adapters.dgl.reader.partition_json import read_partition_json
from sar.adapters.dgl.reader.partition_reader import load_dgl_partition_data
from sar.cli.model_options import add_model, model_of
from sar.cli.sizes import parse_bytes
from sar.comm.launcher import find_place
from sar.core import construct_full_graph
from sar.errors import ConfigError
from sar.host.processes import run_workers
from sar.partition.inspect.text_tables import as_text
from sar.train.graph_counts import count_graph
from sar.train.network import NetworkSpeed, measure_network
from sar.train.profile import profile
from sar.train.profile_report import Spent, total

WARM_UP = 2
"""Epochs that compile kernels and cut tiles."""
UNEVEN = 1.2
"""Greatest over mean compute from which the partitioning is to blame."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar bench-network` takes."""
    parser.add_argument(
        "--workers",
        type=int,
        metavar="W",
        help="to start on this host; default: one for each partition, or 2. Without effect where torchrun or the like "
        "has started several",
    )
    parser.add_argument("--size", type=parse_bytes, default="8MiB", help="of a message (%(default)s)")
    parser.add_argument(
        "--partition-json",
        type=Path,
        metavar="FILE",
        help="a partition directory or its JSON: train on it, and compare",
    )
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="of that training (%(default)s)")
    add_model(parser, default="sage")
    parser.add_argument("--time-limit", type=float, default=1800, metavar="S", help="for all of it (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found, on worker 0 where a launcher has started several."""
    if min(arguments.size, arguments.epochs, 1 if arguments.workers is None else arguments.workers) < 1:
        raise ConfigError("--size, --epochs and --workers: expected at least 1.")
    place = find_place()
    if place is not None and place.world_size > 1:
        report = measure(print, arguments)
        if comm.rank() == 0:
            print(report)
        return 0
    directory, workers = arguments.partition_json, arguments.workers
    parts = 2 if directory is None else read_partition_json(directory, allow_outside=True).num_parts
    workers = workers or parts
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    print(run_workers(measure, arguments, n_workers=workers, n_threads=threads, time_limit=arguments.time_limit)[0])
    return 0


def measure(_: Callable[[Any], None], arguments: argparse.Namespace) -> str:
    """Measure with all workers, and say what was found."""
    comm.initialize_comms()
    speed = measure_network(arguments.size)
    parts = [_speed_table(speed)] if comm.world_size() > 1 else ["One worker needs no network."]
    if arguments.partition_json is not None:
        workers, bandwidth = _train(arguments), min(speed.together)
        parts += [_epoch_table(workers, bandwidth), verdict(workers, bandwidth)]
    return "\n\n".join(parts)


def verdict(workers: Sequence[Spent], bandwidth: float) -> str:
    """What limits training, in one sentence.

    Args:
        workers: an epoch of each.
        bandwidth: bytes a second that a worker sends and receives while all do.
    """
    slowest = max(worker.compute for worker in workers)
    uneven = slowest * len(workers) / sum(worker.compute for worker in workers)
    wire = max(_wire(worker, bandwidth) for worker in workers)
    found = f"an epoch's messages take {wire:.3g} s, its compute {slowest:.3g} s"
    if wire > slowest / 2:
        limits = "The network limits training" if wire > slowest else "The network counts as much as compute"
        enough = _gigabit(2 * bandwidth * wire / slowest)
        how = f"A better partitioning or half precision on the wire sends less; {enough} Gbit/s would do."
        return f"{limits}: {found}. {how}"
    if uneven > UNEVEN:
        return (
            f"The partitioning limits training: {found} on the slowest worker, {uneven:.2f} times the mean, while the "
            "others wait. Balance nodes and edges; sar inspect shows them."
        )
    return f"Compute limits training: {found}, evenly spread; more cores help, a faster network does not."


def _train(arguments: argparse.Namespace) -> list[Spent]:
    """What each worker spends on an epoch with random features, the mean of several."""
    counts = count_graph(
        arguments.partition_json,
        workers=comm.world_size(),
        in_width=arguments.features,
        num_classes=arguments.classes,
    )
    graph = construct_full_graph(load_dgl_partition_data(arguments.partition_json, comm.rank(), "cpu"))
    inputs = {ntype: torch.rand(graph.num_nodes(ntype), width) for ntype, width in counts.info.in_widths.items()}
    x: Any = inputs if len(counts.info.ntypes) > 1 else next(iter(inputs.values()))
    model = model_of(arguments)(counts.info)
    comm.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters())

    def epochs(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            torch.stack([output.square().mean() for output in tree_leaves(model(graph, x))]).sum().backward()
            comm.gather_grads(model)
            optimizer.step()

    epochs(WARM_UP)
    with profile() as found:
        epochs(arguments.epochs)
    return [total(rows) / arguments.epochs for rows in found.workers]


def _speed_table(speed: NetworkSpeed) -> str:
    ranks = range(len(speed.together))
    rows = [("worker", *(f"to {rank}" for rank in ranks), "all at once")]
    for i in ranks:
        alone = [
            f"{_gigabit(speed.bandwidth[i][j])} ({speed.latency[i][j] * 1e6:.0f})" if i != j else "-" for j in ranks
        ]
        rows.append((str(i), *alone, _gigabit(speed.together[i])))
    return f"Gbit/s of a worker (microseconds until a byte has come)\n{as_text(rows, left=1)}"


def _epoch_table(workers: Sequence[Spent], bandwidth: float) -> str:
    rows: list[tuple[str, ...]] = [("worker", "compute (s)", "waits (s)", "MB out", "MB in", "on the wire (s)")]
    for rank, worker in enumerate(workers):
        moved = worker.moved
        seconds = [
            worker.compute,
            moved.seconds_waited,
            moved.bytes_sent / 1e6,
            moved.bytes_received / 1e6,
            _wire(worker, bandwidth),
        ]
        rows.append((str(rank), *(f"{value:.3f}" for value in seconds)))
    return f"an epoch; on the wire: its bytes at the speed of all at once\n{as_text(rows, left=1)}"


def _wire(worker: Spent, bandwidth: float) -> float:
    """Seconds that a worker's messages take; sending and receiving go on side by side."""
    busier = max(worker.moved.bytes_sent, worker.moved.bytes_received)
    return busier / bandwidth if busier else 0.0


def _gigabit(bandwidth: float) -> str:
    return f"{8 * bandwidth / 1e9:.3g}"
