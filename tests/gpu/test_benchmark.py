"""`python -m benchmarks.gpu` and `sar demo --device`, on the pretend device, and on a GPU where there is one."""

import argparse
from itertools import chain, islice
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.pyg import INDEX, Job
from sar.cli.demo import add_arguments, community_graph, train
from sar.host.cuda import why_no_cuda
from sar.partition.in_memory import divide, training_graph
from tests import pretend_gpu
from tests.gpu.places import PRETEND, Place
from tests.matrix import corner
from tests.python_process import run
from tests.workers import WorkerPool

SMALL = ("--nodes", "200", "--edges", "2000", "--epochs", "1", "--warm-up", "1", "--features", "8")


@pytest.mark.parametrize("device", [corner("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tables(device: str, tmp_path: Path) -> None:
    options = "--device", device, *SMALL, "--docs", str(tmp_path)
    done = run("-m", "benchmarks.gpu", *options, timeout=250)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpus.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| 2,200 | ")]
    kernels = 1 + 8 + 4  # the copy, those of float32, and of bfloat16
    assert len(rows) == 3 + 3 + 3 + 2 + kernels  # GAT has no sparse tensors
    assert "out of memory" not in page


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU")
@pytest.mark.parametrize("command", [("benchmarks.gpu",), ("sar.cli", "demo", "--device", "cuda")])
def test_without_a_gpu_one_line_says_so(command: tuple[str, ...]) -> None:
    done = run("-m", *command, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert str(why_no_cuda()) in done.stderr


def train_and_run_kernels(device: str) -> list[list[float]]:
    with pretend_gpu.in_place_of(device):
        graph = gpu.make_graph(200, 2000, 8, torch.device(device))
        (block,) = gpu.distributed(graph).call_context().relation.blocks
        found = islice(gpu.kernels(block, torch.float32, graph.x.device), 4)  # matrices are not pretended
        for kernel in chain(found, gpu.attention_kernels(block, graph.x.device)):
            kernel.call()
        ways = [gpu.train_by(Job("GAT", gpu.NUM_CLASSES, 0, 2, 0), graph, way) for way in (INDEX, gpu.SAR)]
        return [measured.losses for measured in ways if measured is not None]


def test_on_the_pretend_device() -> None:
    pool = WorkerPool(1)
    ((alone, ours),) = pool.run(train_and_run_kernels, pretend_gpu.NAME)
    assert ours == pytest.approx(alone, rel=1e-4)
    pool.close()


def trained(arguments: argparse.Namespace, source: Path, file: Path) -> tuple[list[float], float]:
    pretend_gpu.install()
    with pretend_gpu.in_place_of(arguments.device):
        found = train(None, arguments, "GAT", source, file)
    return found.losses, found.test_accuracy


@pytest.mark.parametrize("place", [PRETEND], indirect=True, ids=str)
def test_demo_on_the_pretend_device(place: Place, tmp_path: Path) -> None:
    graph = training_graph(community_graph(300, 3000, num_features=8, num_classes=3))
    parts = divide(graph, tmp_path / "parts", "graph", place.world_size)
    parser, found = argparse.ArgumentParser(), {}
    add_arguments(parser)
    for device in ("cpu", place.device):
        arguments = parser.parse_args(["--epochs", "3", "--device", device])
        found[device] = place.pool.run(trained, arguments, parts.json_file, tmp_path / "trained.pt")[0]
    assert found["cpu"][0] == pytest.approx(found[place.device][0], rel=1e-4)


@pytest.mark.gpu
def test_demo_on_a_gpu(tmp_path: Path) -> None:
    options = "--device", "cuda", "--nodes", "600", "--degree", "12", "--epochs", "3", "--out", str(tmp_path)
    done = run("-m", "sar.cli", "demo", *options, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "2 workers, sar, cuda" in done.stdout
