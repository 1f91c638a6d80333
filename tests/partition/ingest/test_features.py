"""Features from files of all formats, in slices, and what is refused."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sar.data.arrays import StoredArray
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import JoinedColumn
from sar.partition.ingest.open import open_graph

ROWS = 10
FEAT = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(np.float32)
LABEL = np.arange(ROWS) - 1


@pytest.fixture
def edges(tmp_path) -> Path:
    path = tmp_path / "edges.csv"
    path.write_text("0 1\n1 2\n5 0\n")
    return path


def opened(edges: Path, **options):
    return open_graph(edges, edges.parent / "scratch", **options)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.sampled_from([(), (3,), (2, 2), (0,)]), st.data())
def test_joined_columns_in_slices(tmp_path_factory, sizes, row_shape, data):
    folder = tmp_path_factory.mktemp("columns")
    whole = np.random.default_rng(1).integers(0, 99, (sum(sizes), *row_shape)).astype(">i4")
    parts, first = [], 0
    for number, size in enumerate(sizes):
        (folder / f"{number}").write_bytes(b"header" + whole[first : first + size].tobytes())
        parts.append(StoredArray(folder / f"{number}", 6, (size, *row_shape), whole.dtype))
        first += size
    column = parts[0] if len(parts) == 1 else JoinedColumn(parts)
    assert column.shape == whole.shape
    assert column.dtype == np.int32
    start, stop = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole) + 3))
    found = column[start:stop]
    assert found.dtype == np.int32
    assert found.shape == whole[start:stop].shape
    assert np.array_equal(found, whole[start:stop])


def test_npy_in_many_files_gives_the_number_of_nodes(edges, tmp_path):
    np.save(tmp_path / "feat-0.npy", FEAT[:4])
    np.save(tmp_path / "feat-1.npy", FEAT[4:])
    np.save(tmp_path / "label.npy", LABEL)
    np.save(tmp_path / "weight.npy", np.asfortranarray(FEAT[:3]))
    graph = opened(
        edges,
        node_features={"feat": tmp_path / "feat-*.npy", "_N/label": tmp_path / "label.npy"},
        edge_features={"weight": tmp_path / "weight.npy"},
    )
    assert graph.num_nodes == {"_N": ROWS}
    feat, label = graph.node_data["_N"]["feat"], graph.node_data["_N"]["label"]
    assert feat.shape == (ROWS, 3)
    assert np.array_equal(feat[2:7], FEAT[2:7])
    assert np.array_equal(label[0:ROWS], LABEL)
    weight = graph.edge_data["_N", "_E", "_N"]["weight"]
    assert weight.shape == (3, 3)
    assert np.array_equal(weight[1:3], FEAT[1:3])


@pytest.mark.parametrize(
    "values, message",
    [
        ([[1.0, 2.0], [3.0]], r"row 1 \(from 0\): column 'x' has a list of 1; expected 2 numbers"),
        ([1.0, None], r"row 1 \(from 0\): column 'x' has no value there"),
        (["a", "b"], "column 'x' is of type .*string.*; expected numbers"),
        ([[1.0, None], [1.0, 2.0]], "with missing values in it; expected numbers"),
    ],
)
def test_bad_parquet(edges, tmp_path, values, message):
    pyarrow.parquet.write_table(pyarrow.table({"x": values}), tmp_path / "x.parquet")
    with pytest.raises(PartitionError, match=message):
        opened(edges, node_features={"x": tmp_path / "x.parquet"})


def test_lists_beside_scalars_in_parquet(edges, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0, 2.0], "rows": [[1.0], [2.0]]}), tmp_path / "x.parquet")
    with pytest.raises(PartitionError, match="has lists in one of a, rows"):
        opened(edges, node_features={"x": f"{tmp_path}/x.parquet#a,rows"})


def test_nan_is_named_when_it_is_read(edges, tmp_path):
    feat = FEAT.copy()
    feat[7, 1] = np.nan
    feat[3] = np.finfo(feat.dtype).max  # whose sum is infinite
    np.save(tmp_path / "0.npy", feat[:5])
    np.save(tmp_path / "1.npy", feat[5:])
    files = [tmp_path / "0.npy", tmp_path / "1.npy"]
    column = opened(edges, node_features={"feat": files}).node_data["_N"]["feat"]
    assert np.array_equal(column[0:7], feat[:7])
    for rows in (slice(6, 10), slice(0, 8)):
        with pytest.raises(PartitionError, match=r"1.npy, row 2 \(from 0\), has NaN"):
            column[rows]
    feat[8, 0] = np.inf
    np.save(tmp_path / "1.npy", feat[5:])
    column = opened(edges, node_features={"feat": files}).node_data["_N"]["feat"]
    with pytest.raises(PartitionError, match=r"1.npy, row 3 \(from 0\), has infinity"):
        column[slice(8, 10)]
    (tmp_path / "text.csv").write_text("".join(f"{x}\n" for x in ["1e400", *range(1, len(FEAT))]))
    column = opened(edges, node_features={"feat": tmp_path / "text.csv"}).node_data["_N"]["feat"]
    with pytest.raises(PartitionError, match=r"row 0 \(from 0\), has infinity.*--allow-nan"):
        column[slice(0, 1)]
    allowed = opened(edges, node_features={"feat": files}, allow_nan=True).node_data["_N"]["feat"]
    assert np.array_equal(allowed[5:8], feat[5:8], equal_nan=True)
    np.save(tmp_path / "label.npy", feat[:, 1])
    with pytest.raises(PartitionError, match=r"'_N/label', row 7 \(from 0\), has NaN|label.npy, row 7 .* has NaN"):
        opened(edges, node_features={"label": tmp_path / "label.npy"}, allow_nan=True)  # at once
    mask = np.where(feat[:, 1] > 0, 1.0, np.nan * (feat[:, 1] < 9))
    np.save(tmp_path / "mask.npy", mask)
    with pytest.raises(PartitionError, match="has NaN"):
        opened(edges, node_features={"train_mask": tmp_path / "mask.npy"}, allow_nan=True)


def test_what_does_not_fit(edges, tmp_path):
    np.save(tmp_path / "a.npy", FEAT)
    np.save(tmp_path / "b.npy", FEAT[:, :2])
    np.save(tmp_path / "c.npy", LABEL)
    a, b, c = (tmp_path / f"{name}.npy" for name in "abc")
    with pytest.raises(PartitionError, match=r"a.npy has 10 rows; expected 9, one for each .* of the type of '_N/x'"):
        opened(edges, num_nodes=9, node_features={"x": a})
    with pytest.raises(PartitionError, match=r"a.npy has 10 rows; expected 3"):
        opened(edges, edge_features={"x": a})
    with pytest.raises(PartitionError, match=r"a.npy to .*a.npy has 20 rows; expected 10"):
        opened(edges, node_features={"x": c, "y": [a, a]})
    with pytest.raises(
        PartitionError, match=r"b.npy has rows of shape \(2,\) and float32; expected \(3,\) and float32"
    ):
        opened(edges, node_features={"x": [a, b]})
    with pytest.raises(ConfigError, match=r"no type for the feature 'user/x'; expected TYPE/NAME with a type among _N"):
        opened(edges, node_features={"user/x": a})
    with pytest.raises(PartitionError, match="there is no file"):
        opened(edges, node_features={"x": tmp_path / "missing.npy"})
    edges.write_text("0 10\n")
    with pytest.raises(PartitionError, match=r"line 1, '0 10': the destination is node 10; expected 0 to 9"):
        opened(edges, node_features={"x": a})
