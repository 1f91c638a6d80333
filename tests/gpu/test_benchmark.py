"""Benchmarks and `sar demo` with `--device`, on the pretend device, and on a GPU if there is one."""

import argparse
from pathlib import Path

import pytest
import torch

from sar.cli.arguments import COMMANDS
from sar.cli.demo import MODELS, community_graph, train
from sar.host.cuda import why_no_cuda
from sar.partition.in_memory import divide, training_graph
from tests import pretend_gpu
from tests.gpu.places import PRETEND, Place
from tests.python_process import run


@pytest.mark.gpu
def test_tables(tmp_path: Path) -> None:
    sizes = "--nodes", "200", "--edges", "2000", "--epochs", "1", "--warm-up", "1", "--features", "8", "--repeats", "1"
    for module, options in (("pyg", (*sizes, "--workers", "1")), ("sums", ("--repeats", "1", "--threads", "1"))):
        done = run("-m", f"benchmarks.{module}", "--device", "cuda", *options, "--docs", str(tmp_path), timeout=250)
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpus.md").read_text()
    assert page.count("| sar, W = 1") == 4
    assert "inf" not in page


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU")
@pytest.mark.parametrize("command", [("benchmarks.pyg",), ("benchmarks.sums",), ("sar.cli", "demo")])
def test_without_a_gpu_one_line_says_so(command: tuple[str, ...]) -> None:
    done = run("-m", *command, "--device", "cuda", timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert str(why_no_cuda()) in done.stderr


def trained(arguments: argparse.Namespace, source: Path, file: Path) -> tuple[list[float], float]:
    pretend_gpu.install()
    with pretend_gpu.in_place_of(arguments.device):
        found = train(None, arguments, "GAT", source, file)
    return found.losses, found.test_accuracy


@pytest.mark.parametrize("place", [PRETEND], indirect=True, ids=str)
def test_demo_on_the_pretend_device(place: Place, tmp_path: Path) -> None:
    graph = training_graph(community_graph(300, 3000, num_features=8, num_classes=3))
    parts = divide(graph, tmp_path / "parts", "graph", place.world_size)
    torch.save(MODELS["GAT"](8, 3).state_dict(), tmp_path / "trained.pt")
    parser, found = argparse.ArgumentParser(), {}
    COMMANDS["demo"][0](parser)
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
