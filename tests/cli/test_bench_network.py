"""`sar bench-network`: its measurement of a network of known speed, its verdicts, and the command as a user runs it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sar
from sar.adapters.dgl.layers.models import LayerStack
from sar.cli import bench_network, main
from sar.cli.demo.community_graph import community_graph
from sar.comm import Statistics
from sar.partition.in_memory import divide
from sar.train.footprint import plan_training
from sar.train.graph_counts import count_graph
from sar.train.network import measure_network
from sar.train.profile_report import Spent
from tests.workers import REPOSITORY

SLOW_NETWORK = "ip link set lo up && tc qdisc add dev lo root tbf rate 100mbit burst 256kb latency 100ms"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    graph = community_graph(300, 2400, num_features=6, num_classes=4).with_split().with_self_loops()
    folder: Path = tmp_path_factory.mktemp("parts")
    divide(graph, folder, "small", 2)
    return folder


def measured(size):
    before = sar.comm.statistics()
    speed = measure_network(size)
    return speed, sar.comm.statistics() - before


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_workers_find_the_same_speeds_of_all_pairs(pool, world_size: int) -> None:
    size = 200_000
    results = pool.run(measured, size)
    for speed, moved in results:
        assert speed == results[0][0]
        assert len(speed.together) == world_size
        for i in range(world_size):
            assert (speed.bandwidth[i][i], speed.latency[i][i]) == (0, 0)
            assert all(speed.bandwidth[i][j] > 0 and speed.latency[i][j] > 0 for j in range(world_size) if j != i)
        # Five messages to each other worker alone, five while all send; and small ones.
        assert moved.bytes_sent == pytest.approx(10 * size * (world_size - 1), rel=0.05)


def epoch(compute: float, sent: int, received: int = 0) -> Spent:
    return Spent("all", "", compute + 1, None, Statistics(sent, received, 1, 1.0))


@pytest.mark.parametrize(
    "workers, found",
    [
        ([epoch(1, 30), epoch(1, 10)], "The network limits training: an epoch's messages take 3 s, its compute 1 s."),
        ([epoch(1, 10), epoch(1, 10, 30)], "The network limits training: an epoch's messages take 3 s"),
        ([epoch(1, 7), epoch(1, 7)], "The network counts as much as compute: an epoch's messages take 0.7 s"),
        (
            [epoch(1, 1), epoch(3, 1)],
            "The partitioning limits training: an epoch's messages take 0.1 s, its compute 3 s",
        ),
        ([epoch(1, 1), epoch(1.1, 1)], "Compute limits training"),
        ([epoch(1, 0)], "Compute limits training: an epoch's messages take 0 s"),
    ],
)
def test_verdicts(workers: list[Spent], found: str) -> None:
    said = bench_network.verdict(workers, 10)
    assert said.startswith(found)
    assert said.endswith(".")
    assert "\n" not in said


def test_the_bandwidth_that_would_do_hides_the_messages() -> None:
    said = bench_network.verdict([epoch(1, 3 * 10**9)], 10**9)
    [enough] = re.findall(r"([\d.]+) Gbit/s would do", said)
    assert "Compute limits" in bench_network.verdict([epoch(1, 3 * 10**9)], float(enough) / 8 * 1e9)


@pytest.mark.slow
def test_bytes_of_an_epoch_are_those_of_the_plan(folder: Path, capfd) -> None:
    options = ["--model", "gat", "--hidden", "8", "--layers", "2", "--heads", "2", "--features", "5", "--classes", "3"]
    options += ["--size", "100kB", "--epochs", "3", "--time-limit", "100"]
    assert main(["bench-network", "--partition-json", str(folder), *options]) == 0
    said = capfd.readouterr().out
    counts = count_graph(folder, in_width=5, num_classes=3)
    sar.patch_dgl()
    try:
        plan = plan_training(counts, lambda info: LayerStack("gat", [5, 8, 3], 2))
    finally:
        sar.unpatch_dgl()
    for rank, worker in enumerate(plan.workers):
        [line] = re.findall(rf"^{rank} +[\d.]+ +[\d.]+ +([\d.]+) ", said, re.MULTILINE)
        assert float(line) == pytest.approx(worker.traffic.sent / 1e6, abs=1e-3)
    assert "worker" in said.splitlines()[1]
    assert re.search("limits training|counts as much", said)


@pytest.mark.slow
def test_a_network_of_known_speed(folder: Path) -> None:
    """A hundredth of what workers on one host have: the loopback of a network namespace of its own, shaped."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    shaped = missing or subprocess.run(["unshare", "--net", "sh", "-c", SLOW_NETWORK], check=False).returncode
    if shaped:
        pytest.skip("needs root, util-linux and iproute2")
    command = f"{SLOW_NETWORK} && exec {sys.executable} -m sar bench-network --size 4MiB --partition-json {folder}"
    command += " --hidden 256 --features 2000"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    [there, back] = re.findall(r"^\d +-? *([\d.]+) \(\d+\)", done.stdout, re.MULTILINE)
    assert float(there) == pytest.approx(0.1, rel=0.1)
    assert float(back) == pytest.approx(0.1, rel=0.1)
    assert "The network limits training" in done.stdout


def test_as_a_worker_of_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Only one of the workers that torchrun starts prints; each measures."""
    ranks = iter((0, 1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(bench_network, "measure", lambda report, arguments: "what was found")
    monkeypatch.setattr(bench_network.comm, "rank", lambda: next(ranks))
    for _ in range(2):
        assert main(["bench-network"]) == 0
    assert capsys.readouterr().out == "what was found\n"


@pytest.mark.parametrize("option", ["--size", "--workers", "--epochs"])
def test_bad_numbers(option: str, capsys) -> None:
    assert main(["bench-network", option, "0"]) == 1
    assert "expected at least 1" in capsys.readouterr().err
