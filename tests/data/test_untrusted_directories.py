"""Directories that are damaged, or made to do harm: read, or refused with a `PartitionError`, in bounded memory."""

import json
import os
import resource
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.adapters.dgl.load import load_dgl_partition_data
from sar.data.graph_files import GRAPH_FILE_HEADER_BYTES
from sar.data.tensor_files import ARRAY_MARK
from sar.errors import PartitionError
from sar.partition.inspect.inspection import inspect_directory
from tests.adapters.dgl.directories import (
    Directory,
    heterogeneous_graph,
    homogeneous_graph,
    to_dispatch,
    write_directory,
)


@pytest.mark.parametrize("kind", ["part_graph", "node_feats", "orig_nids"])
def test_links_that_leave_the_directory_are_refused(tmp_path, kind):
    directory = to_dispatch(write_directory(tmp_path / "a", homogeneous_graph(), 2), features=True, orig_ids=True)
    file = (
        directory.file(1, "part_graph").with_name("orig_nids.dgl") if kind == "orig_nids" else directory.file(1, kind)
    )
    file.rename(tmp_path / file.name)
    file.symlink_to(tmp_path / file.name)
    for part in range(2):  # a directory is refused as a whole, on every worker
        with pytest.raises(PartitionError, match=f"of part-1 is {tmp_path / file.name}; expected a file below"):
            load_dgl_partition_data(directory.path, part, "cpu")
    linked = tmp_path / "linked"
    linked.symlink_to(directory.path.parent)
    file.unlink()
    (tmp_path / file.name).rename(file)
    assert len(load_dgl_partition_data(linked / "metadata.json", 1, "cpu").node_features) > 3


def test_a_pipe_is_no_file(tmp_path):
    directory = write_directory(tmp_path, homogeneous_graph(), 2)
    path = directory.file(0, "edge_feats")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PartitionError, match=r"edge_feat.dgl is a pipe or a device; expected a file"):
        load_dgl_partition_data(directory.path, 0, "cpu")


ALLOWANCE = 512 * 2**20
"""Bytes of address space that reading the directories below, of 100 KB, may take; threads reserve most of it."""
NUMBERS = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FILES = ("graph.dgl", "node_feat.dgl", "edge_feat.dgl", "orig_nids.dgl", "orig_eids.dgl")


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> list[Directory]:
    """Directories that load: of `partition_graph`, in several sparse formats, and of the dispatch pipeline."""
    folder = tmp_path_factory.mktemp("directories")
    made = [
        write_directory(folder / "a", homogeneous_graph(), 2),
        write_directory(folder / "b", heterogeneous_graph(), 2, graph_formats=["csc", "csr"]),
        to_dispatch(write_directory(folder / "c", heterogeneous_graph(), 2), features=True, orig_ids=True),
    ]
    for directory in made:
        assert outcome(directory.path) == "sound"
    return made


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """A limit that turns large allocations into errors that are no `PartitionError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWANCE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outcome(path: Path, *, inspect: bool = True) -> str:
    """Load part 0 and, on demand, inspect all; what both say."""
    try:
        data = load_dgl_partition_data(path, 0, "cpu")
        start, end = data.node_ranges[0]
        assert len(data.node_features["_ID"]) == end - start
        said = "loads"
    except PartitionError:
        said = "refused"
    try:
        problems = inspect_directory(path).problems if inspect else ["not asked"]
    except PartitionError:
        problems = ["refused"]
    return "sound" if said == "loads" and not problems else said


def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """One change that a bad disk, an interrupted copy or a hostile hand could have made."""
    marks = [0, len(content) - 40, GRAPH_FILE_HEADER_BYTES]
    at = content.find(ARRAY_MARK.to_bytes(8, "little"))
    while at >= 0:
        marks += [at - 32, at, at + 32]
        at = content.find(ARRAY_MARK.to_bytes(8, "little"), at + 1)
    near = draw(st.sampled_from(marks)) + draw(st.integers(0, 48))
    place = min(max(near if draw(st.booleans()) else draw(st.integers(0, len(content))), 0), len(content))
    match draw(st.sampled_from(["byte", "number", "number", "small number", "cut", "zeros", "twice"])):
        case "byte":
            new = bytes([draw(st.integers(0, 255))])
        case "number":
            new = draw(st.sampled_from(NUMBERS)).to_bytes(8, "little")
        case "small number":
            new = draw(st.integers(0, 2**16)).to_bytes(4, "little")
        case "zeros":
            new = bytes(draw(st.sampled_from([8, 512, 4096])))
        case "cut":
            return content[:place]
        case _:
            return content[:place] + content[place : place + 64] + content[place:]
    return content[:place] + new + content[place + len(new) :]


def attack_files(data: st.DataObject, directories: list[Directory], folder: Path) -> str:
    directory = data.draw(st.sampled_from(directories))
    shutil.copytree(directory.path.parent, folder)
    try:
        parts = [folder / "part0" / name for name in FILES] + [folder / "part1" / "graph.dgl"]
        path = data.draw(st.sampled_from([path for path in parts if path.exists()]))
        content = path.read_bytes()
        for _ in range(data.draw(st.integers(1, 3))):
            content = changed(data.draw, content)
        path.write_bytes(content)
        return outcome(folder / directory.path.name, inspect=not data.draw(st.integers(0, 3)))
    finally:
        shutil.rmtree(folder)


ODD: list[Any] = [
    *(None, True, -1, 0, 1, 3, 60, 1.5, float("nan"), 2**31, 2**63 - 1, 2**63, 2**70, -(2**70)),
    *("", "x", "_N", "a:b:c", "../x", "/dev/zero", "part1/graph.dgl", "\0", "\ud800", "x" * 5000),
    *([], {}, [[]], [[0, 1]], [0, 2**62], [[0, 30], [30, 2**62]], {"x": 0}, {"_N": 0, "x": 0}, [None]),
]


def attack_json(data: st.DataObject, directories: list[Directory], folder: Path) -> str:
    """Replace, remove or repeat what the JSON file has at one or two places."""
    directory = data.draw(st.sampled_from(directories))
    content: Any = directory.json()
    for _ in range(data.draw(st.integers(1, 2))):
        parent, key, value = None, None, content
        while isinstance(value, list | dict) and value and (parent is None or data.draw(st.integers(0, 3))):
            keys = list(value) if isinstance(value, dict) else range(len(value))
            parent, key = value, data.draw(st.sampled_from(keys))
            value = parent[key]
        match data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"])):
            case "replace":
                parent[key] = deepcopy(data.draw(st.sampled_from(ODD)))
            case "remove":
                del parent[key]
            case _ if isinstance(parent, dict):
                parent[data.draw(st.sampled_from(["", "x", "part-2", "a:b:c", "x/y"]))] = parent.pop(key)
    path = directory.path.with_name("changed.json")
    path.write_text(json.dumps(content))
    return outcome(path, inspect=not data.draw(st.integers(0, 3)))


@pytest.mark.parametrize("attack", [attack_files, attack_json])
@pytest.mark.parametrize("examples", [200, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_changed_directories(tmp_path, directories, attack, examples):
    said = []

    @settings(max_examples=examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        said.append(attack(data, directories, tmp_path / "changed"))

    run()
    assert said.count("refused") >= examples // 4  # the changes are no trifles


@pytest.mark.parametrize("content", ["[" * 100_000, '{"part-0":' * 50_000, "\xff", "", "0", '{"num_parts": NaN}'])
def test_json_of_all_kinds(tmp_path, content):
    (tmp_path / "graph.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(PartitionError):
        load_dgl_partition_data(tmp_path / "graph.json", 0, "cpu")
