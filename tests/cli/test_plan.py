"""`sar plan`, run as a user runs it."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sar
from sar.cli import main
from sar.cli.arguments import size
from sar.cli.demo import community_graph
from sar.partition.in_memory import divide, training_graph
from tests.partition.written import small_types


@pytest.fixture(autouse=True)
def dgl_as_it_was() -> Iterator[None]:
    """`sar plan` patches DGL, which its process does not outlive."""
    yield
    sar.unpatch_dgl()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    graph = training_graph(community_graph(300, 2400, num_features=6, num_classes=4))
    folder = tmp_path_factory.mktemp("parts")
    divide(graph, folder, "small", 2)
    return str(folder)


def test_widths_come_from_the_directory(folder: str, capsys, monkeypatch) -> None:
    options = ["--model", "gat", "--heads", "2", "--hidden", "8", "--layers", "2"]
    assert main(["plan", folder, *options]) == 0
    said, told = capsys.readouterr()
    assert not told  # the JSON file has the counts
    assert said.startswith("gat, widths 6 -> 8 -> 4, on 2 workers in mode 1.")
    assert re.search(r"^layers\.0 +attention, additive scores +\d", said, re.MULTILINE)
    assert ", so they fit." in said
    monkeypatch.setattr("sar.cli.plan.machine_memory", lambda: 10**6)
    assert main(["plan", folder, *options]) == 0
    said, told = capsys.readouterr()
    assert ", so they do not fit. --memory SIZE plans" in said


def test_one_partition_in_memory_at_a_time(folder: str, capsys) -> None:
    def said(memory: str, *options: str) -> str:
        assert main(["plan", folder, "--hidden", "2048", "--memory", memory, *options]) == 0
        return capsys.readouterr().out

    assert said("100MB").startswith("sage, widths 6 -> 2048 -> 2048 -> 4. No number of partitions fits 100.0 MB: code ")
    roomy = said("64GiB")
    assert "These 2 partitions, one in memory at a time, fit 64 GiB" in roomy
    assert re.search(r"reads nothing, as the page cache holds it: \d+ s at the disk's \d", roomy)
    plan = json.loads(said("64GiB", "--json"))["plan"]
    too_little = said(f"{(plan['fixed'] + plan['partition'] // 2) / 0.85:.0f}B")
    assert re.search(r"These 2 partitions do not fit .* Divide the graph into [3-9]\. An epoch of 2 writes", too_little)


def test_one_object_for_machines(folder: str, capsys) -> None:
    options = ["--features", "10", "--classes", "3", "--hidden", "5", "--layers", "3", "--json"]
    assert main(["plan", folder, "--model", "gcn", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["widths"] == [10, 5, 5, 3]
    for worker in found["workers"]:
        sent = sum(call["forward"] + call["backward"] for call in worker["calls"]) + worker["parameters_sent"]
        assert 0 < sent < worker["bytes_sent"] < 1.1 * sent
        memory = worker["memory"]
        assert 0 < worker["above_baseline"] < memory["total"]
        assert memory["total"] == sum(v for k, v in memory.items() if k != "total")


MODEL = """
from __future__ import annotations

from dataclasses import dataclass

from beside_mymodel import MAX
from dgl.nn import GINConv
from torch import nn


@dataclass
class Shape:
    reducer: str = MAX


class Model(nn.Module):
    def __init__(self, info):
        super().__init__()
        self.layer = GINConv(nn.Linear(info.in_widths["_N"], info.num_classes), Shape().reducer)

    def forward(self, graph, x):
        return self.layer(graph, x)


def make_model(info):
    return Model(info)


number = 3


def nothing():
    pass
"""


OF_PYG = """
from torch_geometric.nn import GraphSAGE, GAT, GCN

KINDS = {"sage": (GraphSAGE, {}), "gat": (GAT, {"add_self_loops": False}), "gcn": (GCN, {"add_self_loops": False})}


def make_model(info):
    kind, options = KINDS["NAME"]
    return kind(info.in_widths["_N"], 8, 2, info.num_classes, **options)


def with_loops(info):
    return GCN(info.in_widths["_N"], 8, 2, info.num_classes)
"""


@pytest.mark.parametrize("name", ["sage", "gat", "gcn"])
def test_a_model_of_pytorch_geometric(folder: str, tmp_path: Path, capsys, caplog, name: str) -> None:
    (tmp_path / f"pyg_{name}.py").write_text(OF_PYG.replace("NAME", name))
    assert main(["plan", folder, "--model", f"{tmp_path}/pyg_{name}.py:make_model", "--json"]) == 0
    for worker in json.loads(capsys.readouterr().out)["workers"]:
        assert [*dict.fromkeys(call["layer"] for call in worker["calls"])] == ["convs.0", "convs.1"]
        assert sum(call["forward"] + call["backward"] for call in worker["calls"]) > 0
    assert not caplog.records  # such as that a mean of losses is not divided
    assert main(["plan", folder, "--model", f"{tmp_path}/pyg_{name}.py:with_loops"]) == 1
    assert "plan with add_self_loops=False" in capsys.readouterr().err


def write_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mymodel.py").write_text(MODEL)
    (folder / "beside_mymodel.py").write_text("MAX = 'max'")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)


def test_a_model_of_the_users_own(folder: str, tmp_path: Path, capsys, monkeypatch) -> None:
    source = f"{tmp_path / 'mymodel.py'}:make_model"
    write_model(tmp_path, monkeypatch)
    assert main(["plan", folder, "--model", source, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == {"source": source}
    [[call], [_]] = [worker["calls"] for worker in found["workers"]]
    assert (call["layer"], call["operation"]) == ("layer", "update_all, max")
    assert call["forward"] > 0
    assert call["backward"] == 0  # nothing needs a gradient below the maximum
    assert main(["plan", folder, "--model", source]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{source}, on 2 workers in mode 1.")


@pytest.mark.parametrize(
    "name, message",
    [
        ("mymodel.py:number", "defines no function 'number'"),
        ("mymodel.py:missing", "defines no function 'missing'"),
        ("other.py:make_model", "there is no file"),
        ("mymodel.py", "expected one of sage, gcn, gat, or FILE.py:FUNCTION"),
        ("mymodel.py:nothing", "too many positional arguments; expected a function with one argument, (info)"),
    ],
)
def test_a_model_that_is_not_there(folder: str, tmp_path: Path, capsys, monkeypatch, name: str, message: str) -> None:
    write_model(tmp_path, monkeypatch)
    assert main(["plan", folder, "--model", str(tmp_path / name)]) == 1
    assert message in capsys.readouterr().err


def test_directories_that_cannot_be_planned(tmp_path: Path, capsys) -> None:
    typed = divide(small_types(), tmp_path / "typed", "typed", 2).json_file
    assert main(["plan", str(typed)]) == 1  # our own models are for one type
    assert "4 node types and 5 edge types" in capsys.readouterr().err
    broken = divide(community_graph(60, 240), tmp_path / "broken", "broken", 2).json_file
    (broken.parent / "part1" / "node_feat.dgl").unlink()
    assert main(["plan", str(broken), "--features", "3", "--classes", "2"]) == 1
    assert "not sound" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, expected",
    [("8GiB", 8 * 2**30), ("500MB", 5e8), ("1.5k", 1500), ("100B", 100), ("2 KiB", 2048), ("3T", 3e12)],
)
def test_sizes(text: str, expected: float) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "8 gallons", "3", "100i"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        size(text)
