"""A script of plain DGL and its port: few lines differ, and what they print is the same."""

import contextlib
import difflib
import io
import re
import runpy
import sys
from pathlib import Path

import dgl
import pytest
import torch

from sar.cli.demo import community_graph
from sar.partition.in_memory import divide, training_graph
from tests.examples.scripts import TORCHRUN, in_double, run
from tests.matrix import corner
from tests.workers import REPOSITORY

FOLDER = REPOSITORY / "tests" / "examples" / "port"
PLAIN, PORTED = FOLDER / "gat_in_dgl.py", FOLDER / "gat_in_sar.py"
EPOCH = re.compile(r"^epoch (\d+): loss ([\d.]+), validation accuracy ([\d.]+)$", re.MULTILINE)


def changed_lines(before: str, after: str) -> int:
    """Lines that are removed or written, of those that replace each other the more."""
    lines = [text.partition("\n")[2].splitlines() for text in (before, after)]  # the first says what the file is
    blocks = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    return sum(max(i - h, k - j) for kind, h, i, j, k in blocks if kind != "equal")


def test_the_port_changes_fewer_than_15_lines() -> None:
    assert changed_lines("title\na\nb\nc\nd", "other\na\nB\nB\nc") == 3
    assert changed_lines(PLAIN.read_text(), PORTED.read_text()) < 15


def said_by(script: Path, *arguments: object) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(script))["main"](*arguments)
    return said.getvalue()


def train_on_worker(json_file: Path, folder: Path) -> tuple[str, str]:
    """What is said by training at once, and by training that is cut off and goes on."""
    torch.set_default_dtype(torch.float64)
    at_once = said_by(PORTED, json_file, folder / "once")
    cut_off = said_by(PORTED, json_file, folder / "twice", 3).partition("test accuracy")[0]
    return at_once, cut_off + said_by(PORTED, json_file, folder / "twice")


def files(folder: Path, parts: int) -> tuple[str, Path]:
    """The graph as DGL stores it, and its partitions."""
    data = in_double(training_graph(community_graph(300, 2400, 12, 4, homophily=0.7)))
    graph = dgl.graph(tuple(map(torch.from_numpy, data.ends())), num_nodes=data.total_nodes)
    graph.ndata.update({name: torch.from_numpy(column) for name, column in data.node_data["_N"].items()})
    dgl.save_graphs(str(folder / "graph.bin"), [graph])
    return str(folder / "graph.bin"), divide(data, folder / "parts", "graph", parts).json_file


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_both_say_the_same(pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "utils", raising=False)
    graph_file, json_file = files(tmp_path, world_size)
    alone = said_by(PLAIN, graph_file, tmp_path / "alone.pt")
    (at_once, cut_off), *others = pool.run(train_on_worker, json_file, tmp_path)
    assert others == [("", "")] * (world_size - 1)
    assert cut_off == at_once
    compare(at_once, alone)


def compare(said: str, expected: str) -> None:
    epochs, wanted = EPOCH.findall(said), EPOCH.findall(expected)
    assert [(number, accuracy) for number, _, accuracy in epochs] == [(number, a) for number, _, a in wanted]
    assert [float(loss) for _, loss, _ in epochs] == pytest.approx([float(loss) for _, loss, _ in wanted], abs=1e-6)
    assert 20 < len(epochs) < 100  # it stopped early, but learned
    [accuracy] = re.findall(r"^test accuracy ([\d.]+)$", said, re.MULTILINE)
    assert expected.endswith(f"test accuracy {accuracy}\n")
    assert float(accuracy) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], [*TORCHRUN, "2"]])
def test_the_port_from_the_command_line(tmp_path: Path, launcher: list[str]) -> None:
    graph_file, json_file = files(tmp_path, 2)
    in_double = tmp_path / "in_double.py"
    in_double.write_text(
        "import sys, sar, torch, runpy\ntorch.set_default_dtype(torch.float64)\ndel sys.argv[0]\n"
        "sys.path.insert(0, sys.argv[0].rpartition('/')[0])\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    alone = run(str(in_double), str(PLAIN), graph_file, str(tmp_path / "alone.pt"))
    said = run(*launcher, str(in_double), str(PORTED), str(json_file), str(tmp_path / "checkpoints"))
    compare(said, alone)
