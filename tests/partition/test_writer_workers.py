"""Partitioning in a group of workers: worker 0 writes, all get what it returns, and its errors end all."""

import os
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

import sar
from sar.partition.write.write import PartitionReport
from tests.partition.written import SmallDisk, content_of, typed_graph, write
from tests.workers import Err


def write_together(folder: Path) -> PartitionReport:
    return write(typed_graph(), folder)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_workers_get_the_report_of_one_that_writes(pool, world_size, tmp_path):
    expected = write(typed_graph(), tmp_path / "expected")
    for report in pool.run(write_together, tmp_path / "parts"):
        assert report[1:] == expected[1:]
        assert report.json_file == tmp_path / "parts" / "graph.json"
    assert content_of(tmp_path / "parts") == content_of(tmp_path / "expected")
    assert sorted(os.listdir(tmp_path)) == ["expected", "parts"]


def original_ids(folder: Path) -> list[torch.Tensor]:
    src, dst = torch.from_numpy(np.random.default_rng(0).integers(0, 60, (2, 300)))
    graph = dgl.graph((src, dst), num_nodes=60)
    return [*sar.partition_graph(graph, "g", 3, folder, part_method="random", return_mapping=True)]


@pytest.mark.parametrize("world_size", [2])
def test_all_workers_get_the_original_ids(pool, world_size, tmp_path):
    first, second = pool.run(original_ids, tmp_path / "parts")
    stored = [sar.load_dgl_partition_data(tmp_path / "parts" / "g.json", p, "cpu").node_features for p in range(3)]
    assert torch.equal(first[0], torch.cat([part["orig_id"] for part in stored]))
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
    assert first[1].sort().values.equal(torch.arange(300))


def write_until_the_disk_is_full(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if sar.rank() == 0:
            SmallDisk(patch, 60)
        write(typed_graph(), folder)


@pytest.mark.processes("one worker's module is patched")
@pytest.mark.parametrize("world_size", [2])
def test_a_full_disk_stops_all_workers(pool, tmp_path):
    first, second = pool.outcomes(write_until_the_disk_is_full, tmp_path / "parts")
    assert isinstance(first, Err)
    assert first.kind == "PartitionError"
    assert isinstance(second, Err)
    assert second.kind == "PeerError"
    assert "Worker 0 raised PartitionError: the disk of" in second.message
    assert os.listdir(tmp_path) == []
    pool.run(write_together, tmp_path / "parts")
    assert os.listdir(tmp_path) == ["parts"]


def partition_on_one(folder: Path, then: str) -> None:
    """What only worker 0 should not call; the others go on to another call."""
    graph = dgl.graph(([0, 1, 2], [1, 2, 3]))
    if sar.rank() == 0 and then == "partition_graph":
        sar.partition_graph(graph, "g", 2, folder / "parts")
    elif sar.rank() == 0:
        sar.write_partitions(graph, np.zeros(4, int), 1, folder / "parts", "g", method="own")
    sar.all_sum(1)


@pytest.mark.parametrize("call", ["partition_graph", "write_partitions"])
@pytest.mark.parametrize("world_size", [2])
def test_a_graph_is_divided_by_all_workers(pool: Any, world_size: int, call: str, tmp_path: Path) -> None:
    for outcome in pool.outcomes(partition_on_one, tmp_path, call):
        assert outcome.kind == "DisagreementError"
        assert f"sar.{call}" in outcome.message
        assert "which all workers" in outcome.message
    assert not list(tmp_path.iterdir())
