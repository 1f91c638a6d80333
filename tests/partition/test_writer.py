"""The writer of partition directories: what DGL and sar read back, what is left after failures, and memory."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.graph_source import EdgeSource, GraphSource
from sar.partition.inspect.inspection import inspect_directory
from sar.partition.new_directory import new_directory
from sar.partition.write.write import write_partitions, write_parts
from sar.partition.write.write_job import OutputOptions
from tests.partition.written import (
    PARTS,
    check_directory,
    content_of,
    some_assignment,
    sources,
    typed_graph,
    use_small_slices,
    write,
)
from tests.workers import REPOSITORY


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a few rows."""
    use_small_slices(monkeypatch.setattr)


@given(sources(), st.sampled_from([None, 1, 2, 3]))
@settings(max_examples=60)
@pytest.mark.usefixtures("small_slices")
def test_any_graph_is_written_whole(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[GraphSource, Array, int], num_hops: int | None
) -> None:
    graph, part_of, num_parts = drawn
    folder = tmp_path_factory.mktemp("drawn") / "parts"
    report = write_partitions(graph, part_of, num_parts, folder, "drawn", method="custom", num_hops=num_hops)
    check_directory(folder, "drawn", graph, part_of, num_parts, num_hops)
    assert inspect_directory(folder).problems == []
    src, dst = (
        (np.concatenate([np.zeros(0, int), *ends]) for ends in zip(*graph.chunks(), strict=True))
        if graph.total_edges
        else ([], [])
    )
    assert report.nodes == np.bincount(part_of, minlength=num_parts).tolist()
    assert report.edges == np.bincount(part_of[dst] if len(dst) else [], minlength=num_parts).tolist()
    assert report.edge_cut == (np.mean(part_of[src] != part_of[dst]) if len(dst) else 0)
    assert os.listdir(folder.parent) == ["parts"]


@given(sources(), st.sampled_from([None, 1, 2]), st.randoms(use_true_random=False))
@settings(max_examples=40)
@pytest.mark.usefixtures("small_slices")
def test_nodes_may_have_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[GraphSource, Array, int],
    num_hops: int | None,
    random: Random,
) -> None:
    """Also nodes that share a place, which are then ordered by ID."""
    graph, part_of, num_parts = drawn
    place = np.array([random.randrange(8) for _ in part_of], np.int32)
    folder = tmp_path_factory.mktemp("drawn") / "parts"
    output = OutputOptions(folder, "drawn", num_hops=num_hops)
    with new_directory(folder) as directory:
        write_parts(directory, graph, part_of, num_parts, "custom", output, lambda doing, share: None, place)
    check_directory(folder, "drawn", graph, part_of, num_parts, num_hops, place)
    assert inspect_directory(folder).problems == []


# -- what is refused


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda g: (g, some_assignment(g)[1:]), r"shape \(81,\) .* expected \(82,\) integers"),
        (lambda g: (g, some_assignment(g) + 0.0), "type float64"),
        (lambda g: (g, np.where(np.arange(82) == 7, 4, 0)), "node 7 into part 4; expected 0 to 3"),
        (lambda g: (replace(g, edges={}), some_assignment(g)), "no edge types"),
        (lambda g: (replace(g, node_data={"paper": {"x": np.zeros(50, "U1")}}), some_assignment(g)), "paper/x.*<U1"),
        (lambda g: (replace(g, node_data={"paper": {"x": np.zeros(49)}}), some_assignment(g)), r"\(49,\).*50 rows"),
        (lambda g: (replace(g, node_data={"poper": {"x": np.zeros(49)}}), some_assignment(g)), "no type 'poper'"),
        (lambda g: (replace(g, num_nodes={"a/b": 82}), some_assignment(g)), r"names \['a/b'\].*slash"),
    ],
)  # fmt: skip
def test_input_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[GraphSource], tuple[GraphSource, Array]], words: str
) -> None:
    graph, part_of = change(typed_graph())
    with pytest.raises(ConfigError, match=words):
        write_partitions(graph, part_of, PARTS, tmp_path / "parts", "graph", method="custom")
    options: list[tuple[dict[str, int], str]] = [
        ({"num_hops": 0}, "drop the edges"),
        ({"memory": 1000}, "Allow at least 2,097,"),
    ]
    for option, told in options:
        with pytest.raises(ConfigError, match=told):
            write(typed_graph(), tmp_path / "parts", **option)
    assert os.listdir(tmp_path) == []


def test_places_that_are_taken_are_refused(tmp_path: Path) -> None:
    file, partial = tmp_path / "file", tmp_path / "parts.partial"
    file.write_text("mine")
    partial.mkdir()
    for place, words in ((file, "is a file"), (tmp_path, "already holds file"), (file / "parts", "Not a directory")):
        with pytest.raises(ConfigError, match=words):
            write(typed_graph(), place)
    with (partial / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another run is making .*start it once, without torchrun or srun"):
            write(typed_graph(), tmp_path / "parts")
    (partial / "mine").write_text("mine")
    with pytest.raises(ConfigError, match=r"parts\.partial' holds mine, which this version of sar has not written"):
        write(typed_graph(), tmp_path / "parts")
    assert sorted(content_of(tmp_path)) == ["file", "parts.partial/lock", "parts.partial/mine"]
    (partial / "mine").unlink()
    write(typed_graph(), tmp_path / "parts")
    assert sorted(os.listdir(tmp_path)) == ["file", "parts"]


def test_a_directory_that_others_fill_meanwhile_stays(tmp_path: Path) -> None:
    place = tmp_path / "parts"
    place.mkdir()
    with pytest.raises(ConfigError, match=r"parts' already holds notes.txt, and nothing is overwritten"):
        write(typed_graph(), place, progress=lambda doing, share: (place / "notes.txt").touch())
    assert os.listdir(place) == ["notes.txt"]


# -- memory


class GeneratedEdges(EdgeSource):
    """More edges than are ever in memory."""

    num_edges = 3_000_000

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        ids = np.arange(start, stop)
        return ids * 7919 % GeneratedColumn.shape[0], ids % GeneratedColumn.shape[0]


class GeneratedColumn:
    """A field larger than the memory that is allowed."""

    shape = (400_000, 64)
    dtype = np.dtype(np.float32)

    def __getitem__(self, rows: slice) -> Array:
        values = np.arange(rows.start, rows.stop, dtype=np.float32)
        return np.broadcast_to(values[:, None], (len(values), 64))


MEMORY = 16 << 20


def peak_of_a_large_graph(folder: str) -> int:
    from sar.host.memory import PeakMemory

    num_nodes = GeneratedColumn.shape[0]
    etype = ("_N", "_E", "_N")
    write(typed_graph(), Path(folder) / "first")  # so that all code is loaded
    graph = GraphSource({"_N": num_nodes}, {etype: GeneratedEdges()}, {"_N": {"x": GeneratedColumn()}}, {})
    part_of = (np.arange(num_nodes) % 3).astype(np.uint8)
    memory = PeakMemory()
    write_partitions(graph, part_of, 3, Path(folder) / "parts", "graph", method="custom", memory=MEMORY)
    return memory.above_baseline()


def test_memory_stays_within_what_is_allowed(tmp_path: Path) -> None:
    call = f"import tests.partition.test_writer as t; print(t.peak_of_a_large_graph({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", call],
        cwd=REPOSITORY,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) < MEMORY
    written = sum(file.stat().st_size for file in (tmp_path / "parts").rglob("*"))
    assert written > 10 * MEMORY
