"""The writer of partition directories on several workers, with one disk and with several."""

import os
from pathlib import Path

import pytest

import sar
from sar.partition.write.write import PartitionReport
from sar.partition.write.writers import Writers
from tests.partition.written import (
    COUNTS,
    PARTS,
    RELATIONS,
    SmallDisk,
    content_of,
    random_source,
    typed_graph,
    use_small_slices,
    write,
)
from tests.workers import Err


def write_together(folder: Path, local_output: bool, num_hops: int | None = None) -> PartitionReport:
    use_small_slices()
    graph = random_source(0, COUNTS, RELATIONS, two_files=sar.world_size() > 2)
    return write(graph, folder, local_output=local_output, num_hops=num_hops)


@pytest.mark.parametrize("world_size, num_hops", [(2, None), (3, None), (3, 2)])
def test_workers_together_write_the_same(pool, world_size, num_hops, tmp_path):
    graph = typed_graph()
    expected = write(graph, tmp_path / "expected", num_hops=num_hops)
    for report in pool.run(write_together, tmp_path / "parts", False, num_hops):
        assert report[1:] == expected[1:]
        assert report.json_file == tmp_path / "parts" / "graph.json"
    assert content_of(tmp_path / "parts") == content_of(tmp_path / "expected")
    assert sorted(os.listdir(tmp_path)) == ["expected", "parts"]


@pytest.mark.parametrize("world_size", [3])
def test_workers_with_disks_of_their_own_leave_their_parts_there(pool, world_size, tmp_path):
    write(typed_graph(), tmp_path / "expected")
    folders = [tmp_path / f"disk{rank}" / "parts" for rank in range(world_size)]
    pool.run(write_together, True, per_rank=folders)
    merged = {}
    for rank, folder in enumerate(folders):
        found = content_of(folder)
        mine = {f"part{part}" for part in Writers(rank, world_size).parts_of(rank, PARTS)}
        assert {name.split("/")[0] for name in found} == {"graph.json", *mine}
        merged |= found
        assert os.listdir(folder.parent) == ["parts"]
    assert merged == content_of(tmp_path / "expected")


@pytest.mark.parametrize("world_size", [2])
def test_a_halo_needs_a_disk_that_all_share(pool, tmp_path):
    for outcome in pool.outcomes(write_together, tmp_path / "parts", True, 1):
        assert isinstance(outcome, Err)
        assert "num_hops=1 (--num-hops) needs the edges of other parts" in outcome.message
    assert os.listdir(tmp_path) == []


def write_until_the_disk_is_full(folder: Path, resume: bool, full_on: int) -> None:
    use_small_slices()
    with pytest.MonkeyPatch.context() as patch:
        if sar.rank() == full_on:
            SmallDisk(patch, 60)
        write(typed_graph(), folder, resume=resume)


@pytest.mark.processes("one worker's module is patched")
@pytest.mark.parametrize("world_size", [2])
def test_a_full_disk_stops_all_workers(pool, tmp_path):
    first, second = pool.outcomes(write_until_the_disk_is_full, tmp_path / "parts", False, 1)
    assert isinstance(first, Err)
    assert first.kind == "PeerError"
    assert "Worker 1 raised PartitionError: the disk of" in first.message
    assert isinstance(second, Err)
    assert second.kind == "PartitionError"
    assert os.listdir(tmp_path) == []
    pool.outcomes(write_until_the_disk_is_full, tmp_path / "parts", True, 0)
    assert os.listdir(tmp_path) == ["parts.partial"]
    pool.run(write_until_the_disk_is_full, tmp_path / "parts", True, -1)
    use = tmp_path / "expected"
    write(typed_graph(), use)
    assert content_of(tmp_path / "parts") == content_of(use)
