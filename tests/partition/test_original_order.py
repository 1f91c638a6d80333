"""Rows of all parts, back in the order of the input graph."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import sar
from sar.data.part_files import PartFile
from sar.data.partition_json import read_partition_json
from sar.data.regroup import WorkerShare
from sar.errors import ConfigError, PartitionError
from tests.adapters.dgl.directories import (
    Directory,
    heterogeneous_graph,
    homogeneous_graph,
    save_tensors,
    to_dgl_09,
    to_dispatch,
    write_directory,
)
from tests.partition.small_disk import run_on_small_disk

WRITERS = {
    "0.9": to_dgl_09,
    "dispatch": lambda directory: to_dispatch(directory, features=True, orig_ids=True),
}


def parts_of(directory: Directory, ntype: str, rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows in the input order, dealt to the parts in the order of their nodes."""
    ranges = directory.json()["node_map"][ntype]
    sizes = [end - start for start, end in ranges]
    return list(rows[directory.node_ids[ntype]].split(sizes))


@pytest.mark.parametrize("written_by", WRITERS)
@pytest.mark.parametrize("kind", ["tensors", "arrays", "npy files", "DGL files"])
def test_rows_come_back_in_input_order(tmp_path: Path, written_by: str, kind: str, monkeypatch) -> None:
    monkeypatch.setattr("sar.partition.original_order._SLICE_BYTES", 100)  # several slices
    directory = WRITERS[written_by](write_directory(tmp_path / "parts", heterogeneous_graph(), 2))
    for ntype, count in (("paper", 40), ("venue", 12)):
        rows = torch.randn(count, 3, 2)
        values = parts_of(directory, ntype, rows)
        if kind == "arrays":
            values = [value.numpy() for value in values]
        elif kind == "npy files":
            for p, value in enumerate(values):
                np.save(tmp_path / f"{p}.npy", value.numpy())
            values = [tmp_path / f"{p}.npy" for p in range(2)]
        elif kind == "DGL files":
            for p, value in enumerate(values):
                save_tensors(str(tmp_path / f"{p}.dgl"), {"logits": value})
            values = [str(tmp_path / f"{p}.dgl") for p in range(2)]
        result = sar.to_original_order(values, directory.path.parent, ntype=ntype)
        assert np.array_equal(result, rows.numpy())
        out = tmp_path / "out.npy"
        mapped = sar.to_original_order(values, directory.path, ntype=ntype, out=out)
        assert isinstance(mapped, np.memmap)
        assert np.array_equal(np.load(out), rows.numpy())
        assert sorted(file.name for file in tmp_path.glob("out*")) == ["out.npy"]


def own_rows(path: str, out: str | None, bad: bool) -> torch.Tensor:
    """Each worker hands in original IDs, times 10; worker 1 one row less where `bad`."""
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    rows = data.node_features["orig_id"] * 10
    result = sar.to_original_order(rows[1:] if bad and sar.rank() == 1 else rows, path, out=out)
    return torch.from_numpy(np.array(result))


def own_papers(path: str, out: str) -> torch.Tensor:
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    kinds = data.node_features["_TYPE"] == data.node_type_names.index("paper")
    rows = data.node_features["orig_id"][kinds] * 10
    sar.to_original_order(rows, path, ntype="paper", out=out)
    return rows


@pytest.mark.parametrize("num_parts, world_size", [(3, 2), (1, 3)])
def test_more_or_fewer_workers_than_parts(pool, num_parts, world_size, tmp_path) -> None:
    directory = WRITERS["dispatch"](write_directory(tmp_path, heterogeneous_graph(), num_parts))
    out = tmp_path / "together.npy"
    by_worker = pool.run(own_papers, str(directory.path), str(out))
    assert np.array_equal(np.load(out), np.arange(40) * 10)
    assert np.array_equal(sar.to_original_order(by_worker, directory.path, ntype="paper"), np.arange(40) * 10)


@pytest.mark.parametrize("written_by", WRITERS)
def test_each_part_is_read_once_for_all_its_workers(tmp_path: Path, written_by: str, monkeypatch) -> None:
    directory = WRITERS[written_by](write_directory(tmp_path, homogeneous_graph(), 2))
    spec, workers, opened = read_partition_json(directory.path), 7, []
    shares = [WorkerShare.of(spec, worker, workers) for worker in range(workers)]
    assert WorkerShare.all(spec, workers) == shares
    loaded = [sar.load_dgl_partition_data(directory.path, part, "cpu") for part in range(2)]
    ids = torch.cat([part.node_features["orig_id"] for part in loaded])
    monkeypatch.setattr(PartFile, "read", lambda file, read=PartFile.read: opened.append(file) or read(file))
    result = sar.to_original_order([ids[share.start : share.end] for share in shares], directory.path)
    assert np.array_equal(result, np.arange(60))
    assert len(opened) == (4 if written_by == "0.9" else 2)  # for the shares and, where they are in it, the IDs


def own_edges(path: str, out: str, etype: tuple[str, str, str], wrong: int) -> torch.Tensor:
    """Each worker hands in original IDs of its edges, times 10; worker 0 so many rows less."""
    graph = sar.construct_full_graph(sar.load_dgl_partition_data(path, sar.rank(), "cpu"))
    rows = graph.edges[etype].data["orig_id"] * 10
    sar.to_original_order(rows[wrong if sar.rank() == 0 else 0 :], path, etype=etype, out=out)
    return rows


@pytest.mark.parametrize("written_by", WRITERS)
@pytest.mark.parametrize("num_parts, world_size", [(3, 2), (1, 3), (2, 2), (2, 1)])
def test_edges(pool, num_parts, world_size, written_by, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sar.partition.original_order._SLICE_BYTES", 100)
    directory = WRITERS[written_by](write_directory(tmp_path, heterogeneous_graph(), num_parts))
    out = tmp_path / "together.npy"
    for etype, ids in directory.edge_ids.items():
        by_worker = pool.run(own_edges, str(directory.path), str(out), etype, 0)
        expected = np.arange(len(ids)) * 10
        if world_size > 1:
            assert np.array_equal(np.load(out), expected)
        for name in (etype, etype[1]):
            assert np.array_equal(sar.to_original_order(by_worker, directory.path, etype=name), expected)
    with pytest.raises(ConfigError, match="etype is 'likes'; expected one of"):
        sar.to_original_order(by_worker, directory.path, etype="likes")
    by_worker[0] = by_worker[0][1:]
    with pytest.raises(ConfigError, match="one for each edge of type"):
        sar.to_original_order(by_worker, directory.path, etype=etype)
    if world_size > 1:
        outcomes = pool.outcomes(own_edges, str(directory.path), str(out), etype, 1)
        assert [outcome.kind for outcome in outcomes] == ["ConfigError"] + ["PeerError"] * (world_size - 1)


def own_rows_of_no_width(path: str, out: str) -> tuple[int, ...]:
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    return sar.to_original_order(torch.empty(len(data["orig_id"]), 0, 3), path, out=out).shape


@pytest.mark.parametrize("world_size", [2])
def test_rows_may_have_no_width(pool, world_size, tmp_path) -> None:
    directory = WRITERS["dispatch"](write_directory(tmp_path, homogeneous_graph(), world_size))
    assert pool.run(own_rows_of_no_width, str(directory.path), str(tmp_path / "out.npy")) == [(60, 0, 3)] * 2


@pytest.mark.parametrize("world_size", [2])
def test_workers_write_one_file_together(pool, world_size, tmp_path) -> None:
    directory = WRITERS["dispatch"](write_directory(tmp_path, homogeneous_graph(), world_size))
    out = tmp_path / "together.npy"
    for result in pool.run(own_rows, str(directory.path), str(out), False):
        assert torch.equal(result, torch.arange(60) * 10)
    assert np.array_equal(np.load(out), np.arange(60) * 10)
    out.unlink()
    outcomes = pool.outcomes(own_rows, str(directory.path), str(out), True)
    assert [outcome.kind for outcome in outcomes] == ["PeerError", "ConfigError"]
    assert "29 rows" in outcomes[1].message or "shape" in outcomes[1].message
    assert not list(tmp_path.glob("together*"))
    outcomes = pool.outcomes(own_rows, str(directory.path), None, False)
    assert {outcome.kind for outcome in outcomes} <= {"ConfigError", "PeerError"}
    assert any("need `out`" in outcome.message for outcome in outcomes)


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = WRITERS["dispatch"](write_directory(tmp_path / "parts", heterogeneous_graph(), 2))
    values = parts_of(directory, "paper", torch.arange(40))
    out = tmp_path / "out.npy"

    def attempt(values, ntype="paper", out=out):
        return sar.to_original_order(values, directory.path, ntype=ntype, out=out)

    with pytest.raises(ConfigError, match="expected one of \\['author', 'paper', 'venue'\\]"):
        attempt(values, ntype=None)
    with pytest.raises(
        ConfigError, match=r"entry 0 of 1 have shape .*expected 40 rows, one for each node of type 'paper'"
    ):
        attempt(values[:1])
    with pytest.raises(ConfigError, match="there are no values"):
        attempt([])
    with pytest.raises(ConfigError, match=f"entry 1 of 2 have shape .*expected {len(values[1])} rows"):
        attempt([values[0], values[1][1:]])
    with pytest.raises(ConfigError, match="entry 1 of 2 are float64"):
        attempt([values[0], values[1].double()])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        with pytest.raises(ConfigError, match=f"of entry 0' is {str(dtype)[6:]}, which numpy lacks"):
            attempt([value.to(dtype) for value in values])
    with pytest.raises(ConfigError, match=r"missing.npy' cannot be read"):
        attempt([values[0], tmp_path / "missing.npy"])
    with pytest.raises(ConfigError, match=r"expected the name of an \.npy file"):
        attempt(values, out=tmp_path / "out.bin")
    file = directory.path.parent / "part1" / "orig_nids.dgl"
    ids = {name: column.clone() for name, column in load_original(file).items()}
    ids["paper"][0] = ids["paper"][1]
    save_tensors(str(file), ids)
    with pytest.raises(PartitionError, match="not 0 to 39, each once: 1 are there again, 0 are outside"):
        attempt(values)
    ids["paper"][0] = 40
    save_tensors(str(file), ids)
    with pytest.raises(PartitionError, match="0 are there again, 1 are outside"):
        attempt(values)
    assert not list(tmp_path.glob("out*"))


def load_original(file: Path) -> dict[str, torch.Tensor]:
    from tests.adapters.dgl.directories import load_tensors

    return load_tensors(str(file))


def test_a_directory_without_original_ids_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path, homogeneous_graph(), 2)
    with pytest.raises(PartitionError, match=r"Part 0 .* has no original IDs: neither orig_eids"):
        sar.to_original_order([torch.zeros(1)] * 2, directory.path, etype="_E")
    with pytest.raises(PartitionError, match=r"Part 0 .* has no original IDs: neither orig_nids"):
        sar.to_original_order(parts_of(directory, "_N", torch.arange(60)), directory.path)


def put_back_until_there_is_room(folder: str, path: str) -> None:
    """On a disk of 1 MiB: results of 24 MiB, and then of 2 KiB."""
    sizes = np.diff(np.array(json.loads(Path(path).read_text())["node_map"]["_N"]), axis=1)[:, 0]
    with pytest.raises(PartitionError, match=r"out\.npy' of 24,000,000 bytes cannot be written \(No space left"):
        sar.to_original_order([np.ones((size, 50_000)) for size in sizes], path, out=f"{folder}/out.npy")
    assert list(Path(folder).iterdir()) == []
    sar.to_original_order([np.ones((size, 4)) for size in sizes], path, out=f"{folder}/out.npy")
    assert [file.name for file in Path(folder).iterdir()] == ["out.npy"]


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    directory = WRITERS["dispatch"](write_directory(tmp_path / "parts", homogeneous_graph(), 2))
    names = f"{str(tmp_path / 'disk')!r}, {str(directory.path)!r}"
    call = f"import tests.partition.test_original_order as t; t.put_back_until_there_is_room({names})"
    done = run_on_small_disk(tmp_path / "disk", "1m", call)
    assert done.returncode == 0, done.stderr[-2000:]
