"""Every selector after `#`, with every format and shape: the columns that it names, or an error."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sar.errors import ConfigError, PartitionError, SarError
from sar.partition.ingest.open import open_graph

TABLE = np.array([[0, 7, 5, 1], [1, 8, 6, 2], [0, 9, 4, 3]])
PLACES: dict[str, Any] = {
    "*": slice(None), "1": 1, "0": 0, "0-2": slice(0, 3), "0,2": [0, 2], "3,0-1": [3, 0, 1], "1-1": 1, "a": 0, "d": 3,
    "b,a": [1, 0], "c,0": [2, 0], "": None, "9": None, "2-9": None, "nosuch": None, "a,nosuch": None, "-1": None,
    "2-0": None,
}  # fmt: skip
"""By selector the columns that it takes of a table; None: an error."""


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2], [2, 0]]))
    return tmp_path / "e.npy"


def feature(edges: Path, file: str, selector: str = "") -> Any:
    named = f"{edges.parent / file}{'#' * bool(selector)}{selector}"
    return open_graph(edges, edges.parent / "s", node_features={"x": named}).node_data["_N"]["x"][0:9]


def write(path: Path, values: Any) -> None:
    """A table with columns a, b, ..., or an array."""
    columns = dict(zip("abcd", values.T, strict=False))
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        path.write_text("\n".join(",".join(map(str, row)) for row in [columns, *values.tolist()]))


@pytest.mark.parametrize("file", ["x.csv", "x.parquet"])
def test_columns_of_tables(edges: Path, file: str) -> None:
    write(edges.parent / file, TABLE)
    for selector, places in PLACES.items():
        if places is None:
            with pytest.raises(ConfigError, match="column"):
                feature(edges, file, selector)
        else:
            assert feature(edges, file, selector).tolist() == TABLE[:, places].tolist(), selector
    write(edges.parent / file, TABLE[:, 1:2])
    for selector in ("", "*", "a", "0-0"):  # one column is (N,)
        assert feature(edges, file, selector).tolist() == TABLE[:, 1].tolist()


@pytest.mark.parametrize("values", [TABLE[:, 1], TABLE[:, 1:2], TABLE, np.asfortranarray(TABLE)])
def test_arrays_are_taken_whole(edges: Path, values: Any) -> None:
    write(edges.parent / "x.npy", values)
    for selector in ("", "*"):
        assert feature(edges, "x.npy", selector).tolist() == values.tolist()
    for selector in ("1", "0-1", "a"):
        with pytest.raises(ConfigError, match="an array without columns"):
            feature(edges, "x.npy", selector)
    with pytest.raises(ConfigError, match=r"e.npy has no columns .*--columns"):
        open_graph(edges, edges.parent / "s", columns=("1", "0"))


def test_lists(edges: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": TABLE.tolist()}), edges.parent / "x.parquet")
    for selector in ("", "*", "a", "0", "0-0"):
        assert feature(edges, "x.parquet", selector).tolist() == TABLE.tolist()
    for selector in ("1", "b", "0-1"):
        with pytest.raises(ConfigError, match="no column"):
            feature(edges, "x.parquet", selector)


@pytest.mark.parametrize("file", ["x.bin", "metadata.json"])
def test_other_formats_are_no_features_and_no_lists(edges: Path, file: str) -> None:
    path = edges.parent / file
    path.write_bytes(b"\0\1\2\3" * 6)
    for options in ({"node_features": {"x": path}}, {"train_nodes": f"{path}#name"}):
        with pytest.raises(SarError, match=rf"{file}.*expected .*npy"):
            open_graph(edges, edges.parent / "s", **options)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_lists_of_nodes_and_ids_in_one_of_several_columns(edges: Path, ending: str) -> None:
    path = edges.parent / f"t.{ending}"
    write(path, np.array([[5, 2], [6, 0], [7, 1]]))
    graph = open_graph(edges, edges.parent / "s", ids="map", node_features={"id": f"{path}#b"})
    assert graph.node_data["_N"]["id"][:].tolist() == [2, 0, 1]
    for selector in ("7", "0-1", "*"):
        named = f"{path}#{selector}"
        for options in ({"train_nodes": named}, {"ids": "map", "node_features": {"id": named}}):
            with pytest.raises(ConfigError, match="column"):
                open_graph(edges, edges.parent / "s", **options)


def test_columns_that_are_named_by_numbers(tmp_path: Path) -> None:
    """In digits a name goes before a place; an integer is a place."""
    pyarrow.parquet.write_table(pyarrow.table({"1": [0, 1], "0": [1, 2]}), tmp_path / "e.parquet")
    (tmp_path / "e.csv").write_text("1,0\n0,1\n1,2\n")
    for file, options in (("e.parquet", {}), ("e.csv", {"header": True})):
        by_name = open_graph(tmp_path / file, tmp_path / "s", columns=("0", "1"), **options).ends()
        by_place = open_graph(tmp_path / file, tmp_path / "s", columns=(0, 1), **options).ends()
        assert by_name[0].tolist() == by_place[1].tolist() == [1, 2]


def test_two_parquet_columns_of_one_name(edges: Path) -> None:
    table = pyarrow.table([[0, 1, 2], [1, 2, 0], [4, 5, 6]], names=["x", "x", "y"])
    pyarrow.parquet.write_table(table, edges.parent / "t.parquet")
    assert feature(edges, "t.parquet", "y").tolist() == [4, 5, 6]
    for selector in ("x", "1", "*"):
        with pytest.raises(ConfigError, match=r"2 columns .*'x'"):
            feature(edges, "t.parquet", selector)


def test_a_fortran_array_beyond_the_address_space(edges: Path) -> None:
    for shape in ((2**40, 2**40), (2**62, 3), (0, 2**62), (2**63, 0)):
        with (edges.parent / "x.npy").open("wb") as file:
            header = {"descr": "<f8", "fortran_order": True, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        with pytest.raises(PartitionError, match=r"x.npy"):
            feature(edges, "x.npy")
