"""Every selector after `#`, with every format and shape: the columns that it names, or an error."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sar.errors import ConfigError, PartitionError, SarError
from sar.partition.ingest.masks import with_split
from sar.partition.ingest.open import open_graph

TABLE = np.array([[0, 7, 5, 1], [1, 8, 6, 2], [0, 9, 4, 3]])
SHAPES = {"n": TABLE[:, 1], "n1": TABLE[:, 1:2], "nk": TABLE}
PLACES: dict[str, Any] = {
    "": slice(None), "*": slice(None), "1": 1, "0": 0, "0-2": slice(0, 3), "0,2": [0, 2], "3,0-1": [3, 0, 1],
    "1-1": 1, "9": None, "2-9": None, "nosuch": None, "a,nosuch": None, "-1": None, "2-0": None,
}  # fmt: skip
"""By selector the columns that it takes of an array; None: an error."""
NAMES: dict[str, Any] = {"a": 0, "d": 3, "b,a": [1, 0], "c,0": [2, 0]}


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2], [2, 0]]))
    return tmp_path / "e.npy"


def feature(edges: Path, file: str, selector: str) -> Any:
    named = f"{edges.parent / file}{'#' * bool(selector)}{selector}"
    return open_graph(edges, edges.parent / "s", node_features={"x": named}).node_data["_N"]["x"][0:9]


def write(folder: Path, file: str, values: Any) -> None:
    """With columns a, b, ... in tables."""
    names = "abcd"[: values.shape[1]] if values.ndim == 2 else "a"
    columns = dict(zip(names, values.reshape(len(values), -1).T, strict=True))
    match file.partition(".")[2]:
        case "npy":
            np.save(folder / file, values)
        case "f.npy":
            np.save(folder / file, np.asfortranarray(values))
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.table(columns), folder / file)
        case "lists.parquet":
            pyarrow.parquet.write_table(pyarrow.table({"a": values.tolist()}), folder / file)
        case _:
            rows = [",".join(map(str, row)) for row in values.reshape(len(values), -1)]
            (folder / file).write_text("\n".join([",".join(names), *rows]))


@pytest.mark.parametrize("file", ["x.csv", "x.parquet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_columns_of_tables(edges: Path, file: str, shape: str) -> None:
    write(edges.parent, file, SHAPES[shape])
    table = SHAPES[shape].reshape(3, -1)
    for selector, places in {**PLACES, **NAMES}.items():
        last = (places.stop or 1) - 1 if isinstance(places, slice) else -1 if places is None else np.max(places)
        takes_label = selector == "" and table.shape[1] > 1
        expected = None if takes_label or not 0 <= last < table.shape[1] else table[:, places]
        if expected is not None and table.shape[1] == 1:
            expected = table[:, 0]
        if expected is None:
            with pytest.raises(ConfigError, match="column"):
                feature(edges, file, selector)
        else:
            assert feature(edges, file, selector).tolist() == expected.tolist(), selector


@pytest.mark.parametrize("file", ["x.npy", "x.f.npy"])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_are_taken_whole(edges: Path, file: str, shape: str) -> None:
    write(edges.parent, file, SHAPES[shape])
    for selector in ("", "*"):
        assert feature(edges, file, selector).tolist() == SHAPES[shape].tolist()
    for selector in ("1", "0-1", "a"):
        with pytest.raises(ConfigError, match="an array without columns"):
            feature(edges, file, selector)


def test_lists(edges: Path) -> None:
    write(edges.parent, "x.lists.parquet", TABLE)
    for selector in ("", "*", "a", "0", "0-0"):
        assert feature(edges, "x.lists.parquet", selector).tolist() == TABLE.tolist()
    for selector in ("1", "b", "0-1"):
        with pytest.raises(ConfigError, match="no column"):
            feature(edges, "x.lists.parquet", selector)


@pytest.mark.parametrize("file", ["x.bin", "metadata.json"])
def test_other_formats_are_no_features_and_no_lists(edges: Path, file: str) -> None:
    (edges.parent / file).write_bytes(b"\0\1\2\3" * 6)
    for selector in ("", "0", "*", "name"):
        for options in ({"node_features": {"x": f"{edges.parent / file}{'#' * bool(selector)}{selector}"}},
                        {"train_nodes": f"{edges.parent / file}{'#' * bool(selector)}{selector}"}):  # fmt: skip
            with pytest.raises(SarError, match=rf"{file}.*expected .*npy"):
                open_graph(edges, edges.parent / "s", **options)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_lists_of_nodes_and_ids_in_one_of_several_columns(edges: Path, ending: str) -> None:
    write(edges.parent, f"t.{ending}", np.array([[5, 0], [6, 2]]))
    path = edges.parent / f"t.{ending}"
    assert open_graph(edges, edges.parent / "s", train_nodes=f"{path}#b").node_data["_N"]["train_mask"].tolist() == [
        True, False, True]  # fmt: skip
    write(edges.parent, f"t.{ending}", np.array([[5, 2], [6, 0], [7, 1]]))
    graph = open_graph(edges, edges.parent / "s", ids="map", node_features={"id": f"{path}#b"})
    assert graph.node_data["_N"]["id"][:].tolist() == [2, 0, 1]
    for selector in ("7", "0-1", "*"):
        for options in ({"train_nodes": f"{path}#{selector}"},
                        {"ids": "map", "node_features": {"id": f"{path}#{selector}"}}):  # fmt: skip
            with pytest.raises(ConfigError, match="column"):
                open_graph(edges, edges.parent / "s", **options)


def test_columns_of_binary_edges_are_refused(edges: Path) -> None:
    with pytest.raises(ConfigError, match=r"e.npy has no columns .*--columns"):
        open_graph(edges, edges.parent / "s", columns=("1", "0"))


def test_columns_that_are_named_by_numbers(tmp_path: Path) -> None:
    """In digits a name goes before a place; an integer is a place."""
    pyarrow.parquet.write_table(pyarrow.table({"1": [0, 1], "0": [1, 2]}), tmp_path / "e.parquet")
    (tmp_path / "e.csv").write_text("1,0\n0,1\n1,2\n")
    for file, options in (("e.parquet", {}), ("e.csv", {"header": True})):
        by_name = open_graph(tmp_path / file, tmp_path / "s", columns=("0", "1"), **options).ends()
        by_place = open_graph(tmp_path / file, tmp_path / "s", columns=(0, 1), **options).ends()
        assert by_name[0].tolist() == by_place[1].tolist() == [1, 2]


def test_a_split_of_labels_in_one_column_leaves_out_unlabelled_nodes(edges: Path) -> None:
    np.save(edges.parent / "y.npy", np.array([[-1], [1], [-1]]))
    graph = open_graph(edges, edges.parent / "s", node_features={"label": edges.parent / "y.npy"})
    assert with_split(graph, (1, 0, 0)).node_data["_N"]["train_mask"][:].tolist() == [False, True, False]


def test_two_parquet_columns_of_one_name(edges: Path) -> None:
    path = edges.parent / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table([[0, 1, 2], [1, 2, 0], [4, 5, 6]], names=["x", "x", "y"]), path)
    assert feature(edges, "t.parquet", "y").tolist() == [4, 5, 6]
    assert feature(edges, "t.parquet", "1").tolist() == [1, 2, 0]
    assert feature(edges, "t.parquet", "*").tolist() == [[0, 1, 4], [1, 2, 5], [2, 0, 6]]
    assert open_graph(path, edges.parent / "s", columns=(1, 0)).ends()[0].tolist() == [1, 2, 0]
    with pytest.raises(ConfigError, match=r"2 columns .*'x'"):
        feature(edges, "t.parquet", "x")


def test_a_fortran_array_beyond_the_address_space(edges: Path) -> None:
    path = edges.parent / "x.npy"
    for shape in ((2**40, 2**40), (2**62, 3), (0, 2**62), (3, 0), (2**63, 0)):
        with path.open("wb") as file:
            header = {"descr": "<f8", "fortran_order": True, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        if shape == (3, 0):
            assert feature(edges, "x.npy", "").shape == shape
        else:
            with pytest.raises(PartitionError, match=r"x.npy"):
                feature(edges, "x.npy", "")
