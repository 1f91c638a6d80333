"""Edge lists of all formats: what was written is read, in any layout and chunk size, and errors name file and row."""

import gzip
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sar.errors import ConfigError, PartitionError
from sar.partition.ingest import text
from sar.partition.ingest.open import open_graph
from tests.partition.ingest.sources import only_ends, random_edges

SRC, DST = random_edges(0, 40, 100)
EXPECTED = (SRC.tolist(), DST.tolist())


def write_csv(path: Path, src=SRC, dst=DST, delimiter=",", first="", end="\n") -> Path:
    path.write_text(first + end.join(f"{s}{delimiter}{d}" for s, d in zip(src, dst, strict=True)), newline="")
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "|", " ", "\t", " , "])
@pytest.mark.parametrize("first", ["", "from,to\n", "# made by hand\n% 40 nodes\n\n", "\ufefffrom,to\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"], ids=repr)
def test_text_in_any_layout(tmp_path, delimiter, first, end):
    path = write_csv(tmp_path / "edges.csv", delimiter=delimiter, first=first.replace(",", delimiter), end=end)
    graph = open_graph(path, tmp_path / "scratch", num_nodes=40)
    assert graph.num_nodes == {"_N": 40}
    assert only_ends(graph, 7) == only_ends(graph, 1000) == EXPECTED


@given(
    st.lists(st.tuples(st.integers(0, 10**18 - 1), st.integers(0, 9)), min_size=1, max_size=30), st.integers(64, 200)
)
def test_text_in_small_buffers(tmp_path_factory, edges, buffer_bytes):
    folder = tmp_path_factory.mktemp("edges")
    path = write_csv(folder / "edges.txt", *zip(*edges, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_BLOCK_BYTES", buffer_bytes)
        graph = open_graph(path, folder / "scratch")
    assert list(zip(*only_ends(graph), strict=True)) == edges
    assert graph.num_nodes == {"_N": max(max(edge) for edge in edges) + 1}


def test_gzip(tmp_path):
    path = tmp_path / "edges.csv.gz"
    path.write_bytes(gzip.compress(write_csv(tmp_path / "edges.csv").read_bytes()))
    assert only_ends(open_graph(path, tmp_path / "scratch")) == EXPECTED
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(PartitionError, match=r"edges.csv.gz cannot be unpacked"):
        open_graph(path, tmp_path / "scratch")


@pytest.mark.parametrize(
    "line, problem",
    [
        *((line, f"Expected 2 columns, got {1 + line.count(',')}") for line in ("3", "3,4,5", "3,4,", "3 4", "1;2")),
        *((f"{one},4", f"column src: CSV conversion error to int64: invalid value {one!r}")
          for one in ("", "x", "-", "\uff11")),
        *((f"3,{one}", f"column dst: CSV conversion error to int64: invalid value {one!r}")
          for one in ("", "1.5", "nan", "1e3", "1_0", "1.0", "0x", "True", f"{2**64 + 1}", "1" + 70 * "0")),
        ("3,-4", "the destination is node -4; expected 0 to 39"),
        ("40,4", "the source is node 40; expected 0 to 39"),
        ("3,40", "the destination is node 40; expected 0 to 39"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, monkeypatch, line, problem):
    path = tmp_path / "edges.csv"
    path.write_text("src,dst\n1,2\n\n\n" + "1,2\n" * 50 + f"{line}\n3,4\n")
    monkeypatch.setattr(text, "_BLOCK_BYTES", 100)
    with pytest.raises(PartitionError, match=re.escape(f"{path}, line 55, {line!r}: {problem}")):
        open_graph(path, tmp_path / "scratch", num_nodes=40)


def test_text_that_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_BLOCK_BYTES", 100)
    path = tmp_path / "edges.csv"
    path.write_text("1,2\n" + "1" * 300)
    with pytest.raises(PartitionError, match="a line of more than 100 bytes"):
        open_graph(path, tmp_path)
    path.write_text("1,2\n1," + "x" * 90)
    with pytest.raises(PartitionError, match=r"line 2, '1,x{75}\.\.\.': column 1: .* invalid value 'x{90}'"):
        open_graph(path, tmp_path)
    with pytest.raises(ConfigError, match="delimiter is '::'; expected one ASCII character"):
        open_graph(path, tmp_path, delimiter="::")


@pytest.mark.parametrize("dtype", ["int32", "uint16", ">i8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("layout", ["pairs", "rows", "apart"])
def test_npy(tmp_path, dtype, order, layout):
    pairs = np.stack([SRC, DST], axis=1).astype(dtype)
    if layout == "apart":
        np.save(tmp_path / "the_src.npy", pairs[:, 0])
        np.save(tmp_path / "the_dst.npy", pairs[:, 1])
    else:
        np.save(tmp_path / "edges.npy", np.asarray(pairs if layout == "pairs" else pairs.T, order=order))
    for num_nodes in (40, None):
        graph = open_graph(tmp_path / "*.npy", tmp_path / "scratch", num_nodes=num_nodes)
        assert graph.num_nodes == {"_N": 40 if num_nodes else max(SRC.max(), DST.max()) + 1}
        assert only_ends(graph, 7) == EXPECTED


@pytest.mark.parametrize("how", ["list", "directory", "pattern"])
def test_many_files_in_the_order_of_their_numbers(tmp_path, how):
    folder = tmp_path / "edges"
    folder.mkdir()
    bounds = [0, 40, 40, 55, 100]
    files = [folder / f"part-{number}.csv" for number in (1, 2, 10, 20)]
    for file, first, last in zip(files, bounds[:-1], bounds[1:], strict=True):
        write_csv(file, SRC[first:last], DST[first:last])
    (folder / "_SUCCESS").touch()
    path = {"list": files, "directory": folder, "pattern": str(folder / "part-*.csv")}[how]
    assert only_ends(open_graph(path, tmp_path / "scratch")) == EXPECTED


@pytest.mark.parametrize("names", [("src", "dst"), ("a", "b")])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint64"])
def test_parquet(tmp_path, names, dtype):
    ends = dict(zip(names, (SRC.astype(dtype), DST.astype(dtype)), strict=True))
    path = self_written(tmp_path, {"weight": np.ones(100), **ends})
    if names[0] == "a":
        with pytest.raises(ConfigError, match=r"has the columns weight, a, b, .*--columns"):
            open_graph(path, tmp_path / "scratch")
    graph = open_graph(path, tmp_path / "scratch", columns=names if names[0] == "a" else None)
    assert only_ends(graph, 7) == EXPECTED
    assert graph.num_nodes == {"_N": max(SRC.max(), DST.max()) + 1}


def self_written(folder: Path, fields) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(fields), folder / "edges.parquet", row_group_size=13)
    return folder / "edges.parquet"


@pytest.mark.parametrize(
    "src, dst, options, message",
    [
        ([0, 1, 2, 3], [0, 1, 2, None], {}, r"edges.parquet, row 3 \(from 0\): column 'dst' has no value"),
        ([0, 1, -1, 3], [0, 1, 2, 3], {}, r"row 2 \(from 0\): the source is node -1; expected 0 or more"),
        ([0, 1, 2, 3], [0, 1, 2, 4], {"num_nodes": 4}, r"row 3 \(from 0\): the destination is node 4; expected 0 to 3"),
        ([0], [0.5], {}, "column 'dst' is of type double; expected integers, node IDs.*--ids map"),
        (None, None, {}, "edges.parquet cannot be read as a Parquet file"),
    ],
)
def test_bad_parquet(tmp_path, monkeypatch, src, dst, options, message):
    monkeypatch.setattr("sar.partition.ingest.parquet._BATCH_ROWS", 2)
    path = self_written(tmp_path, {"src": pyarrow.array(src or [0]), "dst": pyarrow.array(dst or [0])})
    if src is None:
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(PartitionError, match=message):
        open_graph(path, tmp_path / "scratch", **options)


def test_bad_ids_in_binary_files(tmp_path):
    pairs = np.stack([SRC, DST], axis=1)
    for value, row, end in ((-1, 77, 0), (40, 31, 1)):
        bad = pairs.copy()
        bad[row, end] = value
        np.save(tmp_path / "edges.npy", bad)
        graph = open_graph(tmp_path / "edges.npy", tmp_path / "scratch", num_nodes=40)
        where = (
            rf"edges.npy, row {row} \(from 0\): the {('source', 'destination')[end]} is node {value}; expected 0 to 39"
        )
        with pytest.raises(PartitionError, match=where):
            only_ends(graph)
    np.save(tmp_path / "edges.npy", pairs - 1)
    with pytest.raises(PartitionError, match="is node -1; expected 0 to"):
        only_ends(open_graph(tmp_path / "edges.npy", tmp_path / "scratch"))


@pytest.mark.parametrize(
    "files, message",
    [
        ({"e.npy": -1}, r"e.npy is truncated: it has 1727 bytes; expected 1728"),
        ({"e.npy": b"no array"}, r"e.npy is no .npy file"),
        ({"e.npy": np.zeros((5, 3), int)}, r"shape \(5, 3\); expected \(E, 2\)"),
        ({"e.npy": np.zeros((2, 2), int)}, r"only \(2, 2\), which may be either"),
        ({"e.npy": np.zeros((5, 2))}, "holds float64; expected integers"),
        ({"e.npy": np.array([{}])}, "holds object; expected an array of numbers"),
        ({"e.npy": np.zeros(5, int)}, "1 in all, are lists of numbers; expected two"),
        ({"e.npy": np.zeros(5, int), "f.npy": np.zeros(6, int)}, r"e.npy has 5 rows and .*f.npy 6"),
    ],
)
def test_bad_binary_files(tmp_path, files, message):
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            np.save(tmp_path / name, np.stack([SRC, DST], axis=1) if isinstance(content, int) else content)
        if isinstance(content, int):
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:content])
    with pytest.raises((ConfigError, PartitionError), match=message):
        open_graph([tmp_path / name for name in files], tmp_path / "scratch")


def test_an_edge_pair_layout_is_known_from_the_other_files(tmp_path):
    for number, (first, last) in enumerate(((0, 2), (2, 10))):
        np.save(tmp_path / f"{number}.npy", np.stack([SRC, DST])[:, first:last])
    assert only_ends(open_graph(tmp_path, tmp_path / "scratch")) == (SRC[:10].tolist(), DST[:10].tolist())


def test_missing_and_mixed_files(tmp_path):
    for name in ("edges.csv", "edges.npy", "unknown"):
        write_csv(tmp_path / name)
    for format in (None, "text"):
        assert only_ends(open_graph(tmp_path / "unknown", tmp_path, format=format)) == EXPECTED
    (tmp_path / "unknown").write_bytes(bytes(9))
    for name, format, message in (
        ("missing.csv", None, "there is no file '.*missing.csv'"),
        ("m*.csv", None, "names no files"),
        ("edges.*", None, r"different formats \(npy, text\)"),
        ("unknown", None, r"cannot tell the format of '.*unknown'.*--format"),
        ("unknown", "excel", "format 'excel' was asked for"),
    ):
        with pytest.raises((ConfigError, PartitionError), match=message):
            open_graph(tmp_path / name, tmp_path, format=format)


def test_copies_are_checked_again_for_a_graph_of_fewer_nodes(tmp_path):
    """Loops are compiled without bounds, and rely on it."""
    graph = open_graph(write_csv(tmp_path / "edges.csv"), tmp_path / "scratch", num_nodes=40)
    with pytest.raises(PartitionError, match=r"is node 3\d; expected 0 to 29"):
        only_ends(replace(graph, num_nodes={"_N": 30}))


def test_several_types(tmp_path):
    likes, follows = write_csv(tmp_path / "likes.csv"), tmp_path / "follows.npy"
    np.save(follows, np.stack([SRC, DST + 5], axis=1))
    paths = {"user:likes:item": likes, "user:follows:user": follows}
    graph = open_graph(paths, tmp_path / "scratch", num_nodes={"item": 40})
    assert graph.num_nodes == {"user": (num_users := max(SRC.max(), DST.max() + 5) + 1), "item": 40}
    assert list(graph.edges) == [("user", "likes", "item"), ("user", "follows", "user")]
    src, dst = (np.concatenate(end) for end in zip(*graph.chunks(9), strict=True))
    assert src.tolist() == np.concatenate([SRC, SRC]).tolist()
    assert dst.tolist() == np.concatenate([DST + num_users, DST + 5]).tolist()
    with pytest.raises(ConfigError, match="the edge type 'likes' was named"):
        open_graph({"likes": likes}, tmp_path / "scratch")
    with pytest.raises(ConfigError, match="40 nodes were named for the types user, item"):
        open_graph(paths, tmp_path / "scratch", num_nodes=40)
    with pytest.raises(PartitionError, match=r"likes.csv, line \d+, .*: the destination is node \d+; expected 0 to 2"):
        open_graph(paths, tmp_path / "scratch", num_nodes={"item": 3})
