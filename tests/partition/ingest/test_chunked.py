"""DGL's chunked graph format, written and read back, and metadata that contradicts itself or its files."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.ingest.chunked import write_chunked
from sar.partition.ingest.open import open_graph
from tests.partition.ingest.sources import assert_same, random_edges

LIKES, FOLLOWS, MADE_BY = ("user", "likes", "item"), ("user", "follows", "user"), ("item", "made by", "user")


def hetero() -> GraphSource:
    """Three node types, one without edges; three edge types, one without edges."""
    random = np.random.default_rng(0)
    return GraphSource(
        {"user": 20, "item": 11, "tag": 3},
        {
            LIKES: ArrayEdges(random.integers(0, 20, 30), random.integers(0, 11, 30)),
            FOLLOWS: ArrayEdges(*random_edges(1, 20, 41)),
            MADE_BY: ArrayEdges(np.empty(0, np.int64), np.empty(0, np.int64)),
        },
        {
            "user": {"feat": random.standard_normal((20, 4)).astype(np.float32), "label": np.arange(20) % 3},
            "item": {"odd/name": np.arange(11) > 4, "cube": random.standard_normal((11, 2, 2))},
            "tag": {},
        },
        {LIKES: {"weight": random.standard_normal(30)}, FOLLOWS: {}, MADE_BY: {"when": np.empty((0, 2), np.int32)}},
    )


def homogeneous() -> GraphSource:
    return GraphSource({"_N": 40}, {("_N", "_E", "_N"): ArrayEdges(*random_edges(2, 40, 99))}, {"_N": {}}, {})


@pytest.mark.parametrize("num_chunks", [1, 2, 7])
@pytest.mark.parametrize("graph", [hetero(), homogeneous()], ids=["hetero", "homogeneous"])
def test_round_trip(tmp_path, graph, num_chunks, monkeypatch):
    monkeypatch.setattr("sar.partition.ingest.chunked._PAIRS", 5)
    monkeypatch.setattr("sar.partition.ingest.chunked._SLICE_BYTES", 50)
    file = write_chunked(graph, tmp_path / "out", num_chunks=num_chunks)
    assert file == tmp_path / "out" / "metadata.json"
    for path in (file, file.parent):
        assert_same(open_graph(path, tmp_path / "scratch"), graph)


@pytest.mark.parametrize("spelling", ["per_chunk", "per_type"])
def test_either_spelling_of_the_counts(tmp_path, spelling):
    content = written(tmp_path)
    for key in ("num_nodes", "num_edges"):
        del content[f"{key}_{spelling}"]
    assert_same(rewritten(tmp_path, content), hetero())


def test_written_by_hand(tmp_path):
    """Absolute paths, edges as (2, E) and (2, 2) arrays, features as text, no node_data for most."""
    np.save(tmp_path / "a.npy", np.array([[0, 1], [2, 0]]))
    np.save(tmp_path / "b.npy", np.array([[1, 1, 1], [2, 2, 0]]))
    (tmp_path / "x.csv").write_text("0.5 1\n1.5 2\n2.5 3\n")
    edges = {"format": {"name": "numpy"}, "data": [str(tmp_path / "a.npy")]}
    content = {
        "node_type": ["n"],
        "num_nodes_per_type": [3],
        "edge_type": ["n:r:n", "n:s:n"],
        "num_edges_per_chunk": [[2], [3]],
        "edges": {"n:r:n": edges, "n:s:n": {"format": {"name": "numpy"}, "data": ["b.npy"]}},
        "node_data": {"n": {"x": {"format": {"name": "csv", "delimiter": " "}, "data": ["x.csv"]}}},
    }
    expected = GraphSource(
        {"n": 3},
        {
            ("n", "r", "n"): ArrayEdges(np.array([0, 2]), np.array([1, 0])),
            ("n", "s", "n"): ArrayEdges(np.array([1, 1, 1]), np.array([2, 2, 0])),
        },
        {"n": {"x": np.array([[0.5, 1], [1.5, 2], [2.5, 3]], np.float32)}},
        {},
    )
    assert_same(rewritten(tmp_path, content), expected)


def test_parquet_chunks(tmp_path):
    content = written(tmp_path)
    src, dst = random_edges(1, 20, 41)
    pyarrow.parquet.write_table(pyarrow.table({"0": src[:30], "1": dst[:30]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"0": src[30:], "1": dst[30:]}), tmp_path / "b.parquet")
    content["edges"]["user:follows:user"] = {"format": {"name": "parquet"}, "data": ["a.parquet", "b.parquet"]}
    del content["num_edges_per_chunk"]
    assert_same(rewritten(tmp_path, content), hetero())


def written(folder: Path) -> dict:
    file = write_chunked(hetero(), folder, num_chunks=2)
    return json.loads(file.read_text())


def rewritten(folder: Path, content) -> GraphSource:
    (folder / "metadata.json").write_text(json.dumps(content))
    return open_graph(folder, folder / "scratch")


def change(content, path: str, value) -> None:
    *parents, last = path.split("/")
    for key in parents:
        content = content[key]
    if value is None:
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("node_type", None, "node_type is missing; expected a list of names"),
        ("node_type", ["user", "user", "item"], "expected at least one name, and none twice"),
        ("edge_type", ["user:likes:item", "user:follows:user", "item:made by:maker"], "'item:made by:maker' is not"),
        ("edge_type", ["likes", "user:follows:user", "item:made by:user"], "edge type 'likes' is not NTYPE"),
        ("num_nodes_per_chunk", [[10, 10], [5, 6]], "expected an entry for each of user, item, tag"),
        ("num_nodes_per_chunk", [[10, 10], [5, 7], [1, 2]], r"_per_type is \[20, 11, 3\]; expected \[20, 12, 3\]"),
        ("num_nodes_per_type", [20, 11.5, 3], r"expected \[20, 11, 3\]"),
        ("num_nodes_per_chunk", [[10, 10], [5, -6], [1, 2]], r"'item' under num_nodes are \[5, -6\]; expected numbers"),
        ("edges/user:knows:user", {}, "edges has the types user:knows:user; expected some of"),
        ("edges/user:follows:user", None, "there are no files for the 41 edges of 'user:follows:user'"),
        ("edges/user:follows:user/format", {}, "expected format .with a name. and data"),
        ("edges/user:follows:user/format/name", "xml", "format 'xml'; expected one of csv, numpy, parquet"),
        ("edges/user:follows:user/data", "a.csv", "expected a list of file names"),
        ("edges/user:follows:user/data", ["missing.csv"], "there is no file"),
        ("edges/user:follows:user/format/delimiter", ",", "first line; expected two"),
        ("node_data/maker", {}, "node_data has the types maker; expected some of user, item, tag"),
        ("node_data/user/feat/data", [], "no files for node_data of 'user/feat'"),
        ("node_data/user/feat/format/name", "csv", "or of another format; expected text"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be(tmp_path, path, value, message):
    content = written(tmp_path)
    change(content, path, value)
    with pytest.raises((PartitionError, ConfigError), match=message):
        rewritten(tmp_path, content)


@pytest.mark.parametrize("name", ["../secret.csv", "{outside}/secret.csv", "link.csv", "up/secret.csv"])
@pytest.mark.parametrize("of", ["edges/user:follows:user", "node_data/user/feat"])
def test_files_outside_are_refused(tmp_path, of, name):
    """And errors have nothing of what is in them."""
    content = written(tmp_path / "graph")
    secret, folder = tmp_path / "secret.csv", tmp_path / "graph"
    secret.write_text("hush hush\nhush hush\n")
    (folder / "link.csv").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    change(content, of, {"format": {"name": "csv", "delimiter": " "}, "data": [name.format(outside=tmp_path)]})
    with pytest.raises(PartitionError, match=r"secret\.csv; expected a file below ") as caught:
        rewritten(folder, content)
    assert "hush" not in str(caught.value)
    change(content, of + "/data", ["a\0b"])
    with pytest.raises(PartitionError, match="no file name"):
        rewritten(folder, content)


def test_counts_that_disagree_with_the_files(tmp_path):
    content = written(tmp_path)
    content["num_edges_per_type"][1] = 42
    content["num_edges_per_chunk"][1] = [42]
    with pytest.raises(PartitionError, match=r"have 41 edges; expected 42 as its counts say"):
        rewritten(tmp_path, content)
    content = written(tmp_path / "again")
    content["num_nodes_per_type"][0] = 21
    del content["num_nodes_per_chunk"]
    with pytest.raises(PartitionError, match=r"feat-0.npy to .*feat-1.npy has 20 rows; expected 21, one for each node"):
        rewritten(tmp_path / "again", content)
    content["num_nodes_per_type"][0] = 3
    with pytest.raises(
        PartitionError, match=r"likes%3Aitem-0.csv, line \d+, .*: the source is node \d+; expected 0 to 2"
    ):
        rewritten(tmp_path / "again", content)


@pytest.mark.parametrize(
    "content, words",
    [("{", "is not a JSON file"), ("[" * 10**5, "is not a JSON file"), ("[]", "holds a list; expected an object")],
    ids=["cut off", "nested", "a list"],
)
def test_no_json(tmp_path, content, words):
    (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(PartitionError, match=f"metadata.json {words}"):
        open_graph(tmp_path, tmp_path / "scratch")


def test_no_chunks(tmp_path):
    with pytest.raises(ConfigError, match="num_chunks is 0"):
        write_chunked(homogeneous(), tmp_path / "more", num_chunks=0)
