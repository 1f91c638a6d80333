"""Rows of all workers, back in the order of the input graph."""

from pathlib import Path

import numpy as np
import pytest
import torch

import sar
from sar.errors import ConfigError, PartitionError
from tests.adapters.dgl.directories import heterogeneous_graph, homogeneous_graph, to_dispatch, write_directory
from tests.partition.small_disk import run_on_small_disk


def with_original_ids(directory):
    """As DGL's dispatch pipeline writes it."""
    return to_dispatch(directory, features=True, orig_ids=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("kind", ["tensors", "arrays", "files"])
def test_rows_come_back_in_input_order(tmp_path: Path, kind: str, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr("sar.data.original_order._SLICE_BYTES", 100)  # several slices
    rows = (torch.randn(40, 3, 2) * 9).to(dtype)
    ids = torch.randperm(40).split([7, 0, 33])
    values = [rows[own] for own in ids]
    if kind == "arrays":
        values, ids = [value.numpy() for value in values], [own.numpy() for own in ids]
    elif kind == "files":
        for p, (value, own) in enumerate(zip(values, ids, strict=True)):
            np.save(tmp_path / f"{p}.npy", value.numpy())
            np.save(tmp_path / f"ids{p}.npy", own.numpy())
        values, ids = [tmp_path / f"{p}.npy" for p in range(3)], [str(tmp_path / f"ids{p}.npy") for p in range(3)]
    result = sar.to_original_order(values, ids)
    assert result.dtype == rows.numpy().dtype
    assert np.array_equal(result, rows.numpy())
    mapped = sar.to_original_order(values, ids, out=tmp_path / "out.npy")
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(np.load(tmp_path / "out.npy"), rows.numpy())
    assert sorted(file.name for file in tmp_path.glob("out*")) == ["out.npy"]


def test_one_array_alone() -> None:
    ids = torch.randperm(10)
    assert np.array_equal(sar.to_original_order(ids * 2, ids), np.arange(10) * 2)
    assert sar.to_original_order(torch.empty(0, 3), torch.empty(0, dtype=torch.int32)).shape == (0, 3)


def own_papers(path: str, out: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    kinds = data.node_features["_TYPE"] == data.node_type_names.index("paper")
    ids = data.node_features["orig_id"][kinds]
    sar.to_original_order(ids * 10, ids, out=out)
    return ids * 10, ids


def own_edges(path: str, out: str, etype: tuple[str, str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    graph = sar.construct_full_graph(sar.load_dgl_partition_data(path, sar.rank(), "cpu"))
    ids = graph.edges[etype].data["orig_id"]
    sar.to_original_order(ids * 10, ids, out=out)
    return ids * 10, ids


@pytest.mark.parametrize("num_parts, world_size", [(3, 2), (1, 3), (2, 2)])
def test_workers_write_one_file_together(pool, num_parts, world_size, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sar.data.original_order._SLICE_BYTES", 100)
    directory = with_original_ids(write_directory(tmp_path, heterogeneous_graph(), num_parts))
    out = tmp_path / "together.npy"
    cases = [(40, own_papers, ())]
    cases += [(len(ids), own_edges, (etype,)) for etype, ids in directory.edge_ids.items()]
    for count, function, arguments in cases:
        by_worker = pool.run(function, str(directory.path), str(out), *arguments)
        assert np.array_equal(np.load(out), np.arange(count) * 10)
        assert np.array_equal(sar.to_original_order(*map(list, zip(*by_worker, strict=True))), np.arange(count) * 10)


def own_rows(path: str, out: str | None, harm: str) -> tuple[int, ...]:
    """Each worker hands in rows without width; on worker 1 they do not fit, or their IDs do not."""
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    ids = data["orig_id"].clone()
    rows = torch.empty(len(ids), 0, 3)
    if sar.rank() == 1 and harm:
        rows = rows[1:] if harm == "rows" else rows
        ids[0] = {"rows": ids[0], "again": ids[1], "outside": 60}[harm]
    return sar.to_original_order(rows, ids, out=out).shape


@pytest.mark.parametrize("world_size", [2])
def test_a_failure_leaves_no_file_behind(pool, world_size, tmp_path) -> None:
    directory = with_original_ids(write_directory(tmp_path, homogeneous_graph(), world_size))
    out = tmp_path / "together.npy"
    assert pool.run(own_rows, str(directory.path), str(out), "") == [(60, 0, 3)] * 2
    out.unlink()
    for harm, fails, words in (("rows", 1, "an integer for each"), ("again", 0, "are missing"), ("outside", 0, "60")):
        outcomes = pool.outcomes(own_rows, str(directory.path), str(out), harm)
        assert [outcome.kind for outcome in outcomes] == ["ConfigError", "PeerError"][:: 1 if fails == 0 else -1]
        assert words in outcomes[fails].message
        assert not list(tmp_path.glob("together*"))
    outcomes = pool.outcomes(own_rows, str(directory.path), None, "")
    assert {outcome.kind for outcome in outcomes} <= {"ConfigError", "PeerError"}
    assert any("out is None" in outcome.message for outcome in outcomes)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    ids = [torch.arange(25), torch.arange(25, 40)]
    values = [own.float() for own in ids]

    def refuse(words: str, values=values, ids=ids, out=tmp_path / "out.npy") -> None:
        with pytest.raises(ConfigError, match=words):
            sar.to_original_order(values, ids, out=out)

    refuse("there are 0 values and 0 ids", [], [])
    refuse("there are 1 values and 2 ids", values[:1])
    refuse(r"entry 1 has int64 ids \(15,\) for values \(14,\)", [values[0], values[1][1:]])
    refuse("entry 1 has float32 ids", ids=[ids[0], ids[1].float()])
    refuse("entry 1 has float64 values", [values[0], values[1].double()])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        refuse(f"entry 0 of values are {dtype}.*which numpy lacks", [value.to(dtype) for value in values])
    refuse(r"missing.npy'\), which cannot be read", [values[0], tmp_path / "missing.npy"])
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    refuse("cannot be read as an .npy file", [values[0], tmp_path / "objects.npy"])
    refuse(r"expected the name of an \.npy file", out=tmp_path / "out.bin")
    refuse("1 of the ids 0 to 39 are missing, 39 for one", ids=[ids[0], ids[1].clamp(max=38)])
    refuse("the ids have 40 or 26; expected 0 to 39", ids=[ids[0], ids[1] + 1])
    refuse("the ids have 23 or -1", ids=[ids[0] - 1, ids[1]])
    assert not list(tmp_path.glob("out*"))


def put_back_until_there_is_room(folder: str) -> None:
    """On a disk of 1 MiB: results of 24 MiB, and then of 2 KiB."""
    ids = np.arange(60)
    with pytest.raises(PartitionError, match=r"out\.npy' of 24,000,000 bytes cannot be written \(No space left"):
        sar.to_original_order(np.ones((60, 50_000)), ids, out=f"{folder}/out.npy")
    assert list(Path(folder).iterdir()) == []
    sar.to_original_order(np.ones((60, 4)), ids, out=f"{folder}/out.npy")
    assert [file.name for file in Path(folder).iterdir()] == ["out.npy"]


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    call = f"import tests.data.test_original_order as t; t.put_back_until_there_is_room({str(tmp_path / 'disk')!r})"
    done = run_on_small_disk(tmp_path / "disk", "1m", call)
    assert done.returncode == 0, done.stderr[-2000:]
