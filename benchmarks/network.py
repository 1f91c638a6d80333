"""The measurement with every worker in a network namespace of its own, behind 1 Gbit/s: `python -m benchmarks.network`.

Needs Linux, root and iproute2; where it cannot run, it says why and ends with status 0. Everything is made inside a
network and a mount namespace of this program's own, which the kernel removes with its last process: nothing outside is
touched, and nothing is left however it ends.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import command, measure
from benchmarks.__main__ import dgl_way
from benchmarks.graphs import prepare
from benchmarks.measure import Job, Measurement
from benchmarks.report import MEGA, publish
from benchmarks.runs import Results, Run, Spread, run_all
from sar.errors import SarError

INSIDE = "SAR_BENCHMARK_NAMESPACE"
"""Environment variable that says that this process is in the namespace made for it."""

HUB, INTERFACE, NAMESPACES = "198.18.0.254", "eth0", Path("/run/netns")
CLONE_NEWNET = 0x40000000
HEADER = (
    "model",
    "workers",
    "s / epoch",
    "MB sent",
    "s waited",
    "dense (s)",
    "aggregation (s)",
    "wire (s)",
    "bound (s)",
    "/ bound",
)


def main(argv: Sequence[str]) -> None:
    """Measure, and write the table."""
    parser = command.new_parser("benchmarks.network", __doc__)
    command.add_training(parser, workers=(2, 4))
    parser.add_argument("--graph", default="rmat", metavar="NAME", help="rmat, or a data set (%(default)s)")
    parser.add_argument("--gbit", type=float, default=1.0, metavar="G", help="Gbit/s, each way (%(default)s)")
    arguments = parser.parse_args(argv)
    if INSIDE not in os.environ:
        reason = obstacle()
        if reason is not None:
            print(f"benchmarks.network does not run here: {reason}")
            return
        os.environ[INSIDE] = "1"
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no word about addresses that have no names there
        program = [sys.executable, "-m", "benchmarks.network", *argv]
        os.execvp("unshare", ["unshare", "--mount", "--net", *program])  # this program again; does not return
    _connect(max(arguments.workers), arguments.gbit)
    plan = command.plan_of(arguments, [dgl_way(workers) for workers in (0, *arguments.workers)])
    plan = replace(plan, job=replace(plan.job, floors=True), worker=networked_worker, host=HUB)
    network = f"a namespace for each worker, {arguments.gbit:g} Gbit/s each way (tbf)"
    with command.work_directory(arguments.work) as work:
        graph = prepare(arguments.graph, command.size_of(arguments), arguments.data, work, arguments.seed)
        rows = table(run_all(graph, plan), arguments.gbit * 1e9 / 8)
    conditions = command.conditions_of(argv, arguments, network=network)
    publish(arguments.docs / "benchmarks.md", "network", f"{graph.words()}\n\n{conditions}", rows)


def obstacle() -> str | None:
    """Why this machine cannot make namespaces; None if it can."""
    missing = [tool for tool in ("unshare", "ip", "tc", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; install util-linux and iproute2."
    if os.geteuid() != 0:
        return "network namespaces need root."
    tries = "mount -t tmpfs tmpfs /run && ip netns add try && ip link set lo up"
    tries += " && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms"
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", tries], capture_output=True, text=True, timeout=60, check=False
    )
    return None if done.returncode == 0 else f"a trial failed: {done.stderr.strip()}"


def table(results: Results, bandwidth: float) -> list[tuple[str, ...]]:
    """Seconds of an epoch and of its parts, for each model and W; `HEADER` first. `bandwidth` is in bytes/s."""
    rows: list[tuple[str, ...]] = [HEADER]
    for (model, way), runs in results.runs.items():
        if way.workers:
            parts = [_parts(run, bandwidth) for run in runs]
            sent, *times, bound = (median(values) for values in zip(*parts, strict=True))
            taken = Spread.of(run.seconds for run in runs).text()
            over = Spread.of(run.seconds / part[-1] for run, part in zip(runs, parts, strict=True)).text()
            seconds = (f"{value:.2f}" for value in (*times, bound))
            rows.append((model, f"{way.workers}, mode {way.mode}", taken, f"{sent / MEGA:.1f}", *seconds, over))
    return rows


def _parts(run: Run, bandwidth: float) -> tuple[float, ...]:
    """Bytes of the busiest worker, seconds waited, of dense layers, aggregation and wire, and their bound.

    The bound is for transfers that hide behind the aggregations: dense + max(aggregation, wire).
    """
    traffic = [process.traffic for process in run.processes]
    busiest = max(max(one.sent, one.received) for one in traffic)
    waited, dense, aggregation = (
        max(getattr(one, name) for one in traffic) for name in ("waited", "dense", "aggregation")
    )
    wire = busiest / bandwidth
    return busiest, waited, dense, aggregation, wire, dense + max(aggregation, wire)


def networked_worker(report: Callable[[Any], None], job: Job, partition_json: Path) -> Measurement:
    """`measure.worker` in the namespace of this rank."""
    with open(NAMESPACES / _namespace(int(os.environ["RANK"])), "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise SarError(f"cannot enter the network namespace: {os.strerror(ctypes.get_errno())}.")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return measure.worker(report, job, partition_json)


def _connect(workers: int, gbit: float) -> None:
    """Make one namespace for each worker, all on one bridge, with both ends of each cable shaped."""
    shape = f"root tbf rate {gbit}gbit burst 256kb latency 50ms"
    _run("mount -t tmpfs tmpfs /run")  # so that the names of namespaces are seen from inside only
    _run("ip link set lo up")
    _run("ip link add hub type bridge")
    _run(f"ip address add {HUB}/24 dev hub")
    _run("ip link set hub up")
    for rank in range(workers):
        inside, cable = _namespace(rank), f"cable{rank}"
        _run(f"ip netns add {inside}")
        _run(f"ip link add {cable} type veth peer name {INTERFACE} netns {inside}")
        _run(f"ip link set {cable} master hub up")
        _run(f"tc qdisc add dev {cable} {shape}")
        _run(f"ip -n {inside} address add 198.18.0.{rank + 1}/24 dev {INTERFACE}")
        _run(f"ip -n {inside} link set {INTERFACE} up")
        _run(f"ip -n {inside} link set lo up")
        _run(f"tc -n {inside} qdisc add dev {INTERFACE} {shape}")


def _namespace(rank: int) -> str:
    return f"worker{rank}"


def _run(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise SarError(f"'{line}' failed: {done.stderr.strip()}")


if __name__ == "__main__":
    command.run_main(main)
