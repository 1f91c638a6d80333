"""The measurement with every worker in a network namespace of its own, behind 1 Gbit/s: `python -m benchmarks.network`.

Needs Linux, root and iproute2; where it cannot run, it says why and ends with status 0. Everything is made inside a
network and a mount namespace of this program's own, which the kernel removes with its last process: nothing outside is
touched, and nothing is left however it ends.
"""

import argparse
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
from benchmarks.bounds import epoch_bound
from benchmarks.graphs import prepare
from benchmarks.measure import Job, Measurement
from benchmarks.report import MEGA, describe_graph, describe_setting, write_section
from benchmarks.results import Results, Run, load
from benchmarks.runs import measure_each
from benchmarks.summary import Spread, seconds
from sar.errors import SarError
from sar.partition.inspect.text_tables import as_markdown, as_text

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
    """Measure, or read earlier results, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    command.add_common(parser, workers=(2, 4))
    parser.add_argument("--graph", default="rmat", metavar="NAME", help="rmat, or a data set (%(default)s)")
    parser.add_argument("--gbit", type=float, default=1.0, metavar="G", help="Gbit/s, each way (%(default)s)")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="write network.json anew")
    arguments = parser.parse_args(argv)
    bandwidth = arguments.gbit * 1e9 / 8
    if arguments.earlier is not None:
        [results] = load(arguments.earlier)
    elif INSIDE in os.environ:
        results = _measure(argv, arguments)
    else:
        reason = obstacle()
        if reason is None:
            _continue_inside(argv)
        print(f"benchmarks.network does not run here: {reason}")
        return
    rows = table(results, bandwidth)
    print(f"\n{as_text(rows)}")
    parts = describe_graph(results), describe_setting(results.setting), as_markdown(rows)
    write_section(arguments.docs / "benchmarks.md", "network", "\n\n".join(parts))


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
    for model in results.models():
        for workers, mode in results.rows(model):
            runs = results.find(model, workers, mode)
            parts = [_parts(run, bandwidth) for run in runs]
            dense, aggregation, wire, bound, sent, waited = (median(values) for values in zip(*parts, strict=True))
            over = Spread.of(seconds(run) / part[3] for run, part in zip(runs, parts, strict=True))
            times = (f"{value:.2f}" for value in (waited, dense, aggregation, wire, bound))
            taken = Spread.of(map(seconds, runs)).text()
            rows.append((model, f"{workers}, mode {mode}", taken, f"{sent / MEGA:.1f}", *times, over.text()))
    return rows


def _parts(run: Run, bandwidth: float) -> tuple[float, float, float, float, float, float]:
    """Seconds of dense layers, aggregation and wire, their bound, bytes of the busiest worker, seconds waited."""
    traffic = [process.traffic for process in run.processes if process.traffic]
    dense, aggregation = max(t.dense for t in traffic), max(t.aggregation for t in traffic)
    busiest = max(max(t.sent, t.received) for t in traffic)
    bound = epoch_bound(dense, aggregation, busiest, bandwidth)
    return dense, aggregation, busiest / bandwidth, bound, busiest, max(t.waited for t in traffic)


def _continue_inside(argv: Sequence[str]) -> None:
    """Run this program again, in place of this process, in namespaces of its own; does not return."""
    program = [sys.executable, "-m", "benchmarks.network", *argv]
    os.environ[INSIDE] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no word about addresses that have no names there
    os.execvp("unshare", ["unshare", "--mount", "--net", *program])


def _measure(argv: Sequence[str], arguments: argparse.Namespace) -> Results:
    """Connect the namespaces, then measure; results are saved after each run."""
    _connect(max(arguments.workers), arguments.gbit)
    plan = replace(command.plan_of(arguments), worker=networked_worker, host=HUB)
    setting = command.setting_of("benchmarks.network", argv, arguments)
    setting["network"] = f"a namespace for each worker, {arguments.gbit:g} Gbit/s each way (tbf)"
    with command.work_directory(arguments.work) as work:
        graph = prepare(arguments.graph, command.size_of(arguments), arguments.data, work, arguments.seed)
        return measure_each([graph], plan, setting, work / "network.json")[0]


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
