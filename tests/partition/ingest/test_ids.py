"""IDs that are strings or have gaps: `ids="map"` numbers nodes so that their IDs lead back to the very edges."""

import gzip
import resource
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sar.errors import ConfigError, PartitionError
from sar.partition.ingest import ids, text
from sar.partition.ingest.open import open_graph

INTEGERS = [4_000_000_000_000, 7, 2**63 - 1, -5, 10**15, 0]
NAMES = ["zoë", "7", "007", "0x1f", "a b", "bob"]
PAIRS = [(0, 1), (1, 2), (0, 1), (3, 3), (5, 4), (4, 0), (2, 5)]


def edges_of(names: list) -> tuple[list, list]:
    return [names[u] for u, _ in PAIRS], [names[v] for _, v in PAIRS]


def write(path: Path, sources: list, destinations: list) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"src": sources, "dst": destinations}), path)
    elif path.suffix == ".npy":
        np.save(path, np.array([sources, destinations]).T)
    else:
        lines = "src,dst\n" + "".join(f"{u},{v}\n" for u, v in zip(sources, destinations, strict=True))
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def given_ids(graph, ntype="_N") -> list:
    """The IDs of a type's nodes, in the order of their numbers."""
    rows = graph.node_data[ntype]["id"][:]
    return rows.tolist() if rows.ndim == 1 else [row.tobytes().rstrip(b"\0").decode() for row in rows]


def named_edges(graph, etype=("_N", "_E", "_N")) -> tuple[list, list]:
    src, dst = graph.edges[etype].read(0, graph.edges[etype].num_edges)
    return [given_ids(graph, etype[0])[u] for u in src], [given_ids(graph, etype[2])[v] for v in dst]


@pytest.mark.parametrize(
    ("suffix", "names"),
    [
        *((suffix, INTEGERS) for suffix in (".csv", ".parquet", ".npy")),
        *((suffix, NAMES) for suffix in (".csv", ".parquet")),
    ],
)
def test_ids_lead_back_to_the_edges(tmp_path, suffix, names):
    path = write(tmp_path / f"edges{suffix}", *edges_of(names))
    graph = open_graph(path, tmp_path / "scratch", ids="map")
    assert graph.num_nodes == {"_N": len(names)}
    assert sorted(given_ids(graph)) == sorted(names)
    assert named_edges(graph) == edges_of(names)
    assert graph.node_data["_N"]["id"].dtype == (np.int64 if names is INTEGERS else np.uint8)


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3)), min_size=1, max_size=40),
    st.integers(64, 300),
)
def test_numbers_depend_on_the_ids_alone(tmp_path_factory, pairs, buffer_bytes):
    folder = tmp_path_factory.mktemp("ids")
    ends = [u for u, _ in pairs], [v for _, v in pairs]
    path, backwards = write(folder / "e.csv", *ends), write(folder / "b.csv", ends[1][::-1], ends[0][::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_BLOCK_BYTES", buffer_bytes)
        patch.setattr(ids, "_BITS", 2)
        graph = open_graph(path, folder / "scratch", ids="map")
        assert given_ids(graph) == given_ids(open_graph(backwards, folder / "scratch", ids="map"))
    assert named_edges(graph) == ends
    assert len(given_ids(graph)) == len({*ends[0], *ends[1]})


def test_few_files_are_open_at_once(tmp_path):
    """Some systems allow 256, as many as IDs go to."""
    sources, destinations = np.random.default_rng(0).integers(0, 3000, (2, 6000)).tolist()
    path = write(tmp_path / "edges.npy", sources, destinations)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        graph = open_graph(path, tmp_path / "scratch", ids="map")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert named_edges(graph) == (sources, destinations)


def test_types_apart_and_strings_where_one_file_has_some(tmp_path):
    writes = write(tmp_path / "writes.csv.gz", ["ann", "bo", "ann"], [10**12, 5, 5])
    np.save(tmp_path / "cites.npy", np.array([[5, 10**12], [10**14, 5]]))
    files = {"author:writes:paper": writes, "paper:cites:paper": tmp_path / "cites.npy"}
    with pytest.raises(PartitionError, match=r"only \(2, 2\)"):
        open_graph(files, tmp_path / "s", ids="map")
    np.save(tmp_path / "cites.npy", np.array([[5, 10**12], [10**14, 5], [5, 5]]))
    graph = open_graph(files, tmp_path / "s", ids="map")
    assert graph.num_nodes == {"author": 2, "paper": 3}
    assert sorted(given_ids(graph, "paper")) == [5, 10**12, 10**14]
    assert named_edges(graph, ("author", "writes", "paper")) == (["ann", "bo", "ann"], [10**12, 5, 5])
    write(tmp_path / "writes.csv.gz", ["ann", "bo"], ["p5", 5])
    graph = open_graph(files, tmp_path / "s", ids="map")
    assert sorted(given_ids(graph, "paper")) == ["1000000000000", "100000000000000", "5", "p5"]
    assert named_edges(graph, ("paper", "cites", "paper"))[0] == ["5", "100000000000000", "5"]


def test_unsigned_and_categorical_ids(tmp_path):
    large = [2**64 - 1, 3, 2**63]
    np.save(tmp_path / "edges.npy", np.array([large, large[::-1]], np.uint64).T)
    graph = open_graph(tmp_path / "edges.npy", tmp_path / "s", ids="map")
    assert named_edges(graph) == ([str(one) for one in large], [str(one) for one in large[::-1]])
    category = pyarrow.array(["x", "y", "x"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"src": category, "dst": ["y", "z", "x"]}), tmp_path / "e.parquet")
    assert named_edges(open_graph(tmp_path / "e.parquet", tmp_path / "s", ids="map"))[0] == ["x", "y", "x"]


def test_rows_of_a_table_are_the_nodes(tmp_path):
    path = write(tmp_path / "edges.csv", *edges_of(NAMES))
    order = [3, 0, 5, 1, 4, 2]
    rows = "".join(f"{NAMES[i]};{i};{i}.5\n" for i in order)
    (tmp_path / "nodes.csv").write_text(f"name;label;x\n{rows}lone;9;9.5\n")
    features = {"id": tmp_path / "nodes.csv#name", "label": tmp_path / "nodes.csv#label"}
    graph = open_graph(path, tmp_path / "s", ids="map", node_features=features)
    assert given_ids(graph) == [*(NAMES[i] for i in order), "lone"]
    assert graph.node_data["_N"]["label"][:].tolist() == [*order, 9]
    assert named_edges(graph) == edges_of(NAMES)

    np.save(tmp_path / "ids.npy", np.array(INTEGERS))
    pyarrow.parquet.write_table(pyarrow.table({"id": INTEGERS}), tmp_path / "ids.parquet")
    path = write(tmp_path / "numbers.npy", *edges_of(INTEGERS))
    for table in ("ids.npy", "ids.parquet"):
        graph = open_graph(path, tmp_path / "s", ids="map", node_features={"_N/id": tmp_path / table})
        assert given_ids(graph) == INTEGERS
        assert named_edges(graph) == edges_of(INTEGERS)


def test_errors_name_the_id(tmp_path):
    path = write(tmp_path / "edges.csv", ["ann", "bo"], ["bo", "cy"])

    def raises(kind, match, **options):
        with pytest.raises(kind, match=match):
            open_graph(path, tmp_path / "s", **{"ids": "map"} | options)

    def with_table(lines):
        (tmp_path / "nodes.csv").write_text(f"id,x\n{lines}")
        return {"node_features": {"id": tmp_path / "nodes.csv#id"}}

    unnamed = "name 1 nodes of type '_N' that are in no row of .*nodes.csv, such as 'cy'"
    raises(PartitionError, unnamed, **with_table("bo,1\nann,2\n"))
    raises(PartitionError, "name 3 nodes of type '_N' that are in no row of .*nodes.csv", **with_table(""))
    raises(PartitionError, "ID 'bo' in row 0 .from 0. and in row 2", **with_table("bo,1\nann,2\nbo,3\ncy,1\n"))
    np.save(tmp_path / "x.npy", np.zeros(3))
    raises(ConfigError, "rows of '_N/x' belong to .* unknown.* _N/id=FILE", node_features={"x": tmp_path / "x.npy"})
    raises(ConfigError, "--num-nodes 3.* exclude each other", num_nodes=3)
    raises(
        ConfigError,
        "2 columns were named for the IDs of nodes; expected one",
        node_features={"id": tmp_path / "nodes.csv#id,x"},
    )
    raises(PartitionError, "line 2, 'ann,bo': column src: .* 'ann'.*--ids map", ids=None)
    path.write_text(f"src,dst\nann,{'b' * 256}\n")
    raises(PartitionError, "an ID with a byte 0, or of more than 255 bytes")
    pyarrow.parquet.write_table(pyarrow.table({"src": ["a", None], "dst": ["b", "c"]}), tmp_path / "e.parquet")
    path = tmp_path / "e.parquet"
    raises(PartitionError, "row 1 .from 0.: column 'src' has no value there")
    pyarrow.parquet.write_table(pyarrow.table({"src": [0.5], "dst": [1.5]}), path)
    raises(PartitionError, "column 'src' is of type double; expected integers or strings")
