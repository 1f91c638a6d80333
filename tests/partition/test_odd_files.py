"""Files as users have them, which may be read in more than one way: read right, or refused with what to say."""

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from sar.cli import main
from sar.errors import ConfigError, PartitionError, SarError
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import partition_graph
from sar.partition.ingest.chunked import write_chunked
from sar.partition.ingest.cleanup import clean_up
from sar.partition.ingest.open import open_graph
from tests.partition.ingest.sources import only_ends

ONE = ("_N", "_E", "_N")


def file_of(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Any, **options: Any) -> GraphSource:
    first = path if isinstance(path, Path) else path[0] if isinstance(path, list) else next(iter(path.values()))
    return open_graph(path, first.parent / "scratch", **options)


def pairs(graph: GraphSource) -> list[tuple[int, int]]:
    return list(zip(*only_ends(graph), strict=True))


def named(graph: GraphSource) -> list[tuple[Any, Any]]:
    """The edges by the IDs that nodes have in the input."""
    rows = graph.node_data["_N"]["id"][:]
    ids = rows.tolist() if rows.ndim == 1 else [row.tobytes().rstrip(b"\0").decode() for row in rows]
    return [(ids[u], ids[v]) for u, v in pairs(graph)]


def values(graph: GraphSource, name: str) -> list[Any]:
    return graph.node_data["_N"][name][:].tolist()


def edges_of(tmp_path: Path, num_nodes: int = 3) -> Path:
    return file_of(
        tmp_path, "edges.csv", "src,dst\n" + "".join(f"{i},{(i + 1) % num_nodes}\n" for i in range(num_nodes))
    )


def command(*arguments: Any) -> int:
    return main([str(one) for one in arguments])


def split_of(folder: Path) -> dict[str, int]:
    """The masks in a directory of one part, by the report."""
    split: dict[str, int] = json.loads((folder / "report.json").read_text())["parts"][0]["split"]
    return split


# Tables of edges: what is read


@pytest.mark.parametrize(
    "content, options, expected",
    [
        ("\ufeff# note\r\nsrc,dst\r\n0,1\r\n\r\n1,2\r\n", {}, [(0, 1), (1, 2)]),
        ("# Nodes: 3 Edges: 2\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n", {}, [(0, 1), (1, 2)]),
        ("// by hand\nsrc,dst\n0,1\n1,2\n", {"comment": "//"}, [(0, 1), (1, 2)]),
        ('name,src,dst\n"x, ""y""",0,1\n"#z",1,"2"\n', {}, [(0, 1), (1, 2)]),
        ('"label, long";src;dst\n"a;b";0;1\n', {}, [(0, 1)]),
        ("src,dst,\n0,1,\n1,2,\n", {}, [(0, 1), (1, 2)]),
        ("0|1\n\n1|2\n", {}, [(0, 1), (1, 2)]),
        ("0\t1\t\n1\t2\t\n", {"columns": (0, 1)}, [(0, 1), (1, 2)]),
        ("src\tnote\tdst\n0\t\t1\n1\tx y\t0\n", {"delimiter": "\t"}, [(0, 1), (1, 0)]),  # empty fields keep their place
        ("0;1;1,5\n1;2;2,5\n", {"delimiter": ";", "columns": (0, 1)}, [(0, 1), (1, 2)]),
        ("weight,dst,src\n2.5,1,0\n", {"columns": (2, 1)}, [(0, 1)]),
        ("Quelle,Größe,Ziel\n0,9,1\n", {"columns": ("Quelle", "Ziel")}, [(0, 1)]),
        ("Target,Source,Weight\n1,0,5\n", {}, [(0, 1)]),  # by name, whatever their order and case
        ("to,from\n1,0\n", {}, [(0, 1)]),
        ("dst,src\n1,0\n", {}, [(0, 1)]),
        ("0,1\n1,2\n", {"header": True}, [(1, 2)]),
        ("0,1\n1,0\n", {"header": False}, [(0, 1), (1, 0)]),
        ("0x1,0x2\n0x0,0xA\n", {}, [(1, 2), (0, 10)]),  # no header
        (f"0,{2**63 - 2}\n{2**53 + 1} , 007\n\n", {}, [(0, 2**63 - 2), (2**53 + 1, 7)]),
    ],
)
def test_tables_of_edges(tmp_path: Path, content: str, options: Any, expected: list[tuple[int, int]]) -> None:
    for name in ("e.csv", "e.txt.gz"):
        data = gzip.compress(content.encode()) if name.endswith(".gz") else content
        graph = read(file_of(tmp_path, name, data), **options)
        assert pairs(graph) == expected


@pytest.mark.parametrize(
    "content, options, expected",
    [
        ("1,a\nb,1\n", {}, [("1", "a"), ("b", "1")]),  # mixed, so all are strings
        (f"{2**63},1\n1,{2**64}\n", {}, [(str(2**63), "1"), ("1", str(2**64))]),
        (f"{2**63 - 1},1\n", {}, [(2**63 - 1, 1)]),
        ("007,7\n", {}, [("007", "7")]),
        ("+1,1\n", {}, [("+1", "1")]),
        ("1.0,1\n", {}, [("1.0", "1")]),
        ('"a,b",ü\n日本,"a,b"\n', {}, [("a,b", "ü"), ("日本", "a,b")]),
        ("NA,null\nnan,None\n", {}, [("NA", "null"), ("nan", "None")]),
        (" a , b c \n", {}, [("a", "b c")]),
        ("True,False\n", {}, [("True", "False")]),
        ("#cat,#dog\n%x,#cat\nbob,#dog\n", {}, [("#cat", "#dog"), ("%x", "#cat"), ("bob", "#dog")]),
        ("0x1f,0x2a\n0x2a,0x1f\n", {}, [("0x1f", "0x2a"), ("0x2a", "0x1f")]),
        ("1f,2a\n10,20\n", {}, [("1f", "2a"), ("10", "20")]),
    ],
)
def test_ids_as_they_are_written(tmp_path: Path, content: str, options: Any, expected: list[tuple[Any, Any]]) -> None:
    header = "" if content.startswith(("0x", "1f")) else "src,dst\n"  # hexadecimal numbers are no header
    graph = read(file_of(tmp_path, "e.csv", f"{header}{content}"), ids="map", **options)
    assert (named(graph), graph.notes) == (expected, ())


def test_a_first_row_that_may_be_a_comment_is_asked_for(tmp_path: Path) -> None:
    path = file_of(tmp_path, "tags.csv", "#cat,#dog\nbob,#dog\n")
    with pytest.raises(ConfigError, match="begins with '#cat,#dog': a comment, or a row"):
        read(path, ids="map", header=False)
    assert named(read(path, ids="map", header=False, comment="")) == [("#cat", "#dog"), ("bob", "#dog")]
    graph = read(path, ids="map", header=False, comment="#")
    assert named(graph) == [("bob", "#dog")]


def test_the_command_says_what_was_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, "edges.csv", "0,1\n1,2\n2,0\n")
    for more in (["--out", tmp_path / "p"], ["--assign-only", "--write-assignment", tmp_path / "a"]):
        assert command("partition", path, "--header", "--parts", 2, *more) == 0
        assert "edges.csv: the first line, 0, 1, was taken for names of columns" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, options",
    [
        *((name, "ann lee\tbob\nbob\tcy d\n", {"header": False, "delimiter": delimiter})
          for name in ("people.txt", "people.tsv") for delimiter in ("\t", None)),
        ("people.tsv", "src\tdst\nann lee\tbob\nbob\tcy d\n", {}),
        ("people.txt", "src\tdst\nann lee\tbob\nbob\tcy d\n", {"delimiter": "\t"}),
        ("people.txt", "src\tdst\nann lee\tbob\nbob\tcy d\n", {}),
    ],
)  # fmt: skip
def test_names_with_blanks_between_tabs(tmp_path: Path, name: str, content: str, options: Any) -> None:
    graph = read(file_of(tmp_path, name, content), ids="map", **options)
    assert (named(graph), graph.num_nodes) == ([("ann lee", "bob"), ("bob", "cy d")], {"_N": 3})


def test_the_command_takes_tab_by_name(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a.txt", "!by hand\nsrc\tdst\nann\tbob\nbob\tcy d\n")
    arguments = ["--ids", "map", "--parts", 1, "--delimiter", "TAB", "--comment", "!", "--out", tmp_path / "p"]
    assert command("partition", path, *arguments) == 0
    report = json.loads((tmp_path / "p" / "report.json").read_text())
    assert report["num_nodes"] == {"_N": 3}


@pytest.mark.parametrize(
    "table, edges, delimiter, expected",
    [
        ("id\tnick\tx\n7\t\t30\n9\tz z\t40\n", "src\tdst\n9\t7\n", "\t", ([(9, 7)], [30, 40])),
        ("id;x\na,b;1.5\nc,d;2.5\n", "src;dst\na,b;c,d\n", ";", ([("a,b", "c,d")], [1.5, 2.5])),
    ],
)
def test_a_delimiter_that_is_given_is_that_of_tables_too(
    tmp_path: Path, table: str, edges: str, delimiter: str, expected: Any
) -> None:
    nodes = file_of(tmp_path, "nodes.txt", table)
    features = {"id": f"{nodes}#id", "x": f"{nodes}#x"}
    graph = read(file_of(tmp_path, "e.txt", edges), ids="map", delimiter=delimiter, node_features=features)
    assert (named(graph), values(graph, "x")) == expected


# Tables of edges: what is refused


@pytest.mark.parametrize(
    "content, options, words",
    [
        ("src,dst\n# by hand\n0,1\n", {}, r"line 2, '# by hand': .*Comments stand before the first row"),
        ("src dst\nann bob\nbob\tcy d\n", {"ids": "map"}, "line 3, .* a tab within .*--delimiter TAB"),
        ("src dst\nann bob\nbob  cy\n", {"ids": "map"}, "line 3, 'bob  cy': 3 fields; .*tr -s ' '"),
        ("0 1\n1  2\n", {"delimiter": " "}, "line 2, '1  2': 3 fields; expected 2, separated by ' '"),
        ("0 1\n  \n", {"delimiter": " "}, "line 2"),
        ("0,1\n#1,2\n", {}, "line 2, '#1,2': column 0 has '#1'; expected an integer"),
        # One row, if lines were not counted.
        ('name,src,dst\n"a,0,1\nb,2,3\nc",4,5\n', {}, "line 2, '\"a,0,1': a quotation mark is .* not closed"),
        ('name,src,dst\n"a,0,1\nb",2,3\n', {}, "line 2, '\"a,0,1': a quotation mark is .* not closed"),
        ("0x1,0x2\n0,0x0B\n", {"num_nodes": 11}, "line 2, '0,0x0B': the destination is node 11; expected 0 to 10"),
        # Between CR alone, which ends a row for pyarrow.
        ("src,dst\na,b\nc,d\r,\r", {"ids": "map"}, "lines that end in CR alone"),
        (b"0,1\r1,2\r", {}, "lines that end in CR alone"),
        (gzip.compress(b"0,1\n", mtime=0), {}, "packed by gzip; expected text, or a name that ends in .gz"),
        (bz2.compress(b"0,1\n"), {}, "is packed; expected text.* Unpack it"),
        (b"\xfd7zXZ\0", {}, "is packed.*Unpack"),
        (b"\x28\xb5\x2f\xfd\0", {}, "is packed.*Unpack"),
        (b"PAR1....", {}, "of another format.*--format"),
        ("0,1\n".encode("utf-16"), {}, "UTF-16; expected UTF-8"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, content: Any, options: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        read(file_of(tmp_path, "e.txt", content), **options)


@pytest.mark.parametrize("name", ["g.mtx", "g.txt", "g.mtx.gz"])
def test_matrix_market_is_refused(tmp_path: Path, name: str) -> None:
    content = b"%%MatrixMarket matrix coordinate pattern symmetric\n% note\n3 3 2\n2 1\n3 1\n"
    path = file_of(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content)
    for options in ({}, {"format": "text", "comment": "%"}):
        with pytest.raises(ConfigError, match=r"is a MatrixMarket file.*scipy.io.mmread"):
            read(path, **options)


@pytest.mark.parametrize("content", ["", "src,dst\n", "# one\n% two\n", "\n\n", "\ufeff"])
@pytest.mark.parametrize("ids", [None, "map"])
def test_nothing_to_read_is_an_error(tmp_path: Path, content: str, ids: Any) -> None:
    path = file_of(tmp_path, "e.csv", content)
    with pytest.raises(PartitionError, match=r"there are no edges of _N:_E:_N in .*e.csv.*--allow-empty"):
        read(path, ids=ids)
    graph = read(path, ids=ids, allow_empty=True)
    assert (graph.num_nodes, pairs(graph)) == ({"_N": 0}, [])


def test_no_edges_in_binary_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = np.empty(0, int)
    np.save(tmp_path / "e.npy", np.empty((0, 2), int))
    pyarrow.parquet.write_table(pyarrow.table({"src": none, "dst": none}), tmp_path / "e.parquet")
    for name in ("e.npy", "e.parquet"):
        with pytest.raises(PartitionError, match="there are no edges"):
            read(tmp_path / name)
        assert read(tmp_path / name, num_nodes=4, allow_empty=True).total_edges == 0
    arguments = [tmp_path / "e.npy", "--num-nodes", 4, "--parts", 2, "--method", "random", "--out", tmp_path / "p"]
    assert command("partition", *arguments) == 1
    assert "--allow-empty" in capsys.readouterr().err
    assert command("partition", "--allow-empty", *arguments) == 0


def test_npz_files_are_to_be_saved_otherwise(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", src=[0], dst=[1])
    with pytest.raises(ConfigError, match=r"g.npz' is an .npz file, which is not read.*sar.partition_graph"):
        read(tmp_path / "g.npz")


@pytest.mark.parametrize("ending", [".bz2", ".xz", ".zst", ".zip"])
def test_packed_files_are_to_be_unpacked(tmp_path: Path, ending: str) -> None:
    with pytest.raises(ConfigError, match=r"is packed; .*Unpack it"):
        read(file_of(tmp_path, f"e.csv{ending}", b"x"))


def test_damage_is_told_as_such(tmp_path: Path) -> None:
    for content in (b"\0" * 100, bytes(range(256)), b"\x1f\x8b" + b"x" * 50):
        for name in ("e.csv", "e.csv.gz", "e.parquet", "e.npy"):
            for ids in (None, "map"):
                with pytest.raises(SarError):
                    read(file_of(tmp_path, name, content), ids=ids)


# Masks


@pytest.mark.parametrize("codes", [[0, 1, 2], [0.0, 0.5, 1.0], [-1, 0, 1]])
def test_codes_are_no_mask(tmp_path: Path, codes: list[float]) -> None:
    np.save(tmp_path / "m.npy", codes)
    with pytest.raises(PartitionError, match=r"'_N/train_mask' has .* expected a mask .*--train-nodes FILE"):
        read(edges_of(tmp_path), node_features={"train_mask": tmp_path / "m.npy"})


def test_masks_of_numbers_and_of_words(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.array([[1], [0], [1]], np.uint8))
    words = file_of(tmp_path, "v.txt", "True\nfalse\nFALSE\n")
    graph = read(edges_of(tmp_path), node_features={"train_mask": tmp_path / "m.npy", "val_mask": words})
    assert values(graph, "train_mask") == [1, 0, 1]
    assert values(graph, "val_mask") == [True, False, False]
    assert graph.node_data["_N"]["val_mask"].dtype == bool


def test_one_of_several_splits(tmp_path: Path) -> None:
    masks = np.array([[1, 0], [1, 1], [0, 1]], bool)
    np.save(tmp_path / "m.npy", masks)
    options: dict[str, Any] = {"node_features": {"train_mask": tmp_path / "m.npy"}}
    assert values(read(edges_of(tmp_path), mask_column=1, **options), "train_mask") == [False, True, True]
    for column in (None, 2, -1):
        with pytest.raises(ConfigError, match=r"shape \(3, 2\): 2 splits.* expected 0 to 1 .*--mask-column"):
            read(edges_of(tmp_path), mask_column=column, **options)
    with pytest.raises(ConfigError, match="expected masks of several columns"):
        read(edges_of(tmp_path), mask_column=0)
    arguments = ["--node-feature", f"train_mask={tmp_path / 'm.npy'}", "--mask-column", 0, "--out", tmp_path / "p"]
    assert command("partition", edges_of(tmp_path), "--parts", 1, *arguments) == 0
    assert split_of(tmp_path / "p")["train_mask"] == 2


def test_splits_of_a_graph_in_memory(tmp_path: Path) -> None:
    fields = {"train_mask": np.ones((3, 10), bool)}
    graph = GraphSource({"_N": 3}, dict(read(edges_of(tmp_path)).edges), {"_N": fields}, {})
    with pytest.raises(ConfigError, match=r"shape \(3, 10\): 10 splits"):
        partition_graph(graph, "g", 1, str(tmp_path / "p"))
    assert not (tmp_path / "p").exists()


# Lists of nodes


def test_lists_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"2\n0\n"))
    np.save(tmp_path / "val.npy", [1])
    pyarrow.parquet.write_table(pyarrow.table({"node": [3], "x": [1]}), tmp_path / "test.parquet")
    lists = {"train_nodes": tmp_path / "train.csv.gz", "val_nodes": tmp_path / "val.npy"}
    graph = read(edges_of(tmp_path, 4), test_nodes=f"{tmp_path / 'test.parquet'}#node", **lists)
    found = [values(graph, name) for name in ("train_mask", "val_mask", "test_mask")]
    assert np.array(found).astype(int).tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    arguments = ["--train-nodes", tmp_path / "train.csv.gz", "--val-nodes", tmp_path / "val.npy"]
    arguments += ["--test-nodes", f"{tmp_path / 'test.parquet'}#node", "--parts", 1, "--out", tmp_path / "p"]
    assert command("partition", edges_of(tmp_path, 4), *arguments) == 0
    assert split_of(tmp_path / "p") == {"train_mask": 2, "val_mask": 1, "test_mask": 1}


def test_lists_of_names(tmp_path: Path) -> None:
    edges = file_of(tmp_path, "e.csv", "src,dst\nzoë,bob\nbob,annabel\n")
    graph = read(edges, ids="map", train_nodes=file_of(tmp_path, "t.txt", "name\nzoë\nannabel\n"), header=True)
    ids = [row.tobytes().rstrip(b"\0").decode() for row in graph.node_data["_N"]["id"][:]]
    assert {one for one, chosen in zip(ids, values(graph, "train_mask"), strict=True) if chosen} == {"zoë", "annabel"}
    listed = file_of(tmp_path, "t.txt", "name\nbob\ncy\n")
    with pytest.raises(PartitionError, match=r"t.txt has the ID 'cy', which no node has"):
        read(edges, ids="map", train_nodes=f"{listed}#name")
    sparse = file_of(tmp_path, "s.csv", f"{10**12},5\n5,7\n")
    graph = read(sparse, ids="map", val_nodes=file_of(tmp_path, "v.txt", f"{10**12}\n"))
    assert [values(graph, "id")[i] for i in np.flatnonzero(values(graph, "val_mask"))] == [10**12]


def test_lists_of_nodes_by_type(tmp_path: Path) -> None:
    paths = {"a:to:b": edges_of(tmp_path), "b:to:a": edges_of(tmp_path)}
    listed = file_of(tmp_path, "t.txt", "2\n")
    graph = read(paths, train_nodes={"b": listed})
    assert graph.node_data["b"]["train_mask"][:].tolist() == [False, False, True]
    assert "train_mask" not in graph.node_data["a"]
    arguments = ["--train-nodes", f"b={listed}", "--parts", 1, "--out", tmp_path / "p"]
    assert command("partition", *(f"{name}={path}" for name, path in paths.items()), *arguments) == 0
    assert split_of(tmp_path / "p") == {"train_mask": 1}
    with pytest.raises(ConfigError, match="the nodes of train_mask are to be by type; expected some of a, b"):
        read(paths, train_nodes=listed)


@pytest.mark.parametrize(
    "content, problem",
    [("0\n3\n", "the ID '3', which no node"), ("-1\n", "the ID '-1'"), ("0\n1\n0\n", "the node '0' more than once"),
     ("0\n1.5\n", "other things than integers")],
)  # fmt: skip
def test_lists_that_are_none(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(PartitionError, match=problem):
        read(edges_of(tmp_path), train_nodes=file_of(tmp_path, "t.txt", content))


def test_a_mask_is_no_list(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.array([True, False, True]))
    with pytest.raises(PartitionError, match="holds bool"):
        read(edges_of(tmp_path), train_nodes=tmp_path / "m.npy")
    with pytest.raises(PartitionError, match=r"has 2 rows; expected 3.*--train-nodes FILE"):
        read(edges_of(tmp_path), num_nodes=3, node_features={"train_mask": file_of(tmp_path, "t.txt", "0\n2\n")})


def test_torch_is_not_asked_to_read_lists(tmp_path: Path) -> None:
    torch.save(torch.tensor([0]), tmp_path / "train.pt")
    with pytest.raises(ConfigError, match="cannot tell the format"):
        read(edges_of(tmp_path), train_nodes=tmp_path / "train.pt")


# Headers


def test_names_that_are_numbers(tmp_path: Path) -> None:
    feat = file_of(tmp_path, "feat.csv", "0,1,2\n.5,1,1\n.25,2,2\n1,3,3\n")
    with pytest.raises(ConfigError, match=r"begins with '0, 1, 2': names of columns, as pandas .*--no-header"):
        read(edges_of(tmp_path), node_features={"feat": f"{feat}#*"})
    graph = read(edges_of(tmp_path), header=True, node_features={"feat": f"{feat}#*"})
    assert values(graph, "feat") == [[0.5, 1, 1], [0.25, 2, 2], [1, 3, 3]]
    assert any("the first line, 0, 1, 2, was taken for names" in note for note in graph.notes)
    rows = file_of(tmp_path, "rows.csv", "0,1\n1,0\n")
    plain = file_of(tmp_path, "plain.csv", "0,1\n1,0\n")
    graph = read(plain, header=False, node_features={"feat": f"{rows}#*"})
    assert (values(graph, "feat"), pairs(graph)) == ([[0, 1], [1, 0]], [(0, 1), (1, 0)])


def test_the_header_option_is_for_every_table(tmp_path: Path) -> None:
    edges = file_of(tmp_path, "e.csv", "0,1\n1,0\n")
    weights = file_of(tmp_path, "w.csv", "7\n8\n")
    graph = open_graph(edges, tmp_path / "s", header=False, edge_features={"w": weights})
    assert graph.edge_data[ONE]["w"][:].tolist() == [7, 8]
    graph = open_graph(edges, tmp_path / "s", header=True, edge_features={"w": weights})
    assert (pairs(graph), graph.edge_data[ONE]["w"][:].tolist()) == ([(1, 0)], [8])


def test_a_feature_file_with_a_row_more_or_less_names_itself(tmp_path: Path) -> None:
    labels = file_of(tmp_path, "labels.txt", "0\n1\n1\n0\n")
    for count in (3, 5):
        with pytest.raises(PartitionError, match=rf"labels.txt has 4 rows; expected {count}.*--header or --no-header"):
            read(edges_of(tmp_path, 3), num_nodes=count, node_features={"label": labels})
    match = (
        "line 5, '3,4': the destination is node 4; expected 0 to 3.*there are 4 nodes follows .*rows of .*labels.txt"
    )
    with pytest.raises(PartitionError, match=match):
        read(file_of(tmp_path, "edges.csv", "src,dst\n0,1\n1,2\n2,3\n3,4\n"), node_features={"label": labels})
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2], [4, 3]]))
    with pytest.raises(PartitionError, match=r"is node 4.* follows from the rows of .*labels.txt"):
        only_ends(read(tmp_path / "e.npy", node_features={"label": labels}))


def test_a_column_that_is_named_stands_in_a_header(tmp_path: Path) -> None:
    edges = file_of(tmp_path, "e.csv", "ann,bob\nbob,cy\n")
    table = file_of(tmp_path, "t.csv", "name,2020\nbob,1\nann,2\ncy,3\n")
    features = {"id": f"{table}#name", "x": f"{table}#2020"}
    graph = read(edges, ids="map", header=False, node_features={"id": f"{table}#name"})
    assert named(graph) == [("ann", "bob"), ("bob", "cy")]
    graph = read(
        file_of(tmp_path, "e.csv", "src,dst\nann,bob\nbob,cy\n"), ids="map", header=True, node_features=features
    )
    assert values(graph, "x") == [1, 2, 3]


# Several files


def test_columns_by_name_in_every_file(tmp_path: Path) -> None:
    first = file_of(tmp_path, "a-1.csv", "u,v\n0,1\n")
    other = file_of(tmp_path, "a-2.csv", "v,u\n0,1\n")
    assert pairs(read([first, other])) == [(0, 1), (1, 0)]
    assert pairs(read([other, first])) == [(1, 0), (0, 1)]
    more = file_of(tmp_path, "a-3.csv", "x,y\n0,1\n")
    with pytest.raises(ConfigError, match=r"a-3.csv has the columns x, y; expected u, v among them, as in .*a-1.csv"):
        read([first, more])
    tail = file_of(tmp_path, "a-4.csv", "5,6\n")  # as of a file that was cut into pieces
    assert pairs(read([other, tail])) == [(1, 0), (6, 5)]
    with pytest.raises(ConfigError, match=r"has names of columns.*and .*a-4.csv has none"):
        read([tail, other])


def test_parquet_columns_by_name_in_every_file(tmp_path: Path) -> None:
    for number, names in enumerate([("a", "b"), ("b", "a"), ("a", "c")]):
        pyarrow.parquet.write_table(pyarrow.table([[0], [1]], names=list(names)), tmp_path / f"{number}.parquet")
    files = [tmp_path / f"{number}.parquet" for number in range(3)]
    assert pairs(read(files[:2])) == [(0, 1), (1, 0)]
    assert named(read(files[:2], ids="map")) == [(0, 1), (1, 0)]
    with pytest.raises(ConfigError, match="has the columns a, c; expected a, b"):
        read(files)


def test_feature_columns_by_name_in_every_file(tmp_path: Path) -> None:
    first = file_of(tmp_path, "f-1.csv", "a,b\n1,2\n3,4\n")
    other = file_of(tmp_path, "f-2.csv", "b,a\n6,5\n")
    pattern = f"{tmp_path}/f-*.csv#*"
    assert values(read(edges_of(tmp_path), node_features={"x": pattern}), "x") == [[1, 2], [3, 4], [5, 6]]
    other.write_text("b,a,c\n6,5,7\n")
    with pytest.raises(ConfigError, match=rf"f-2.csv has the columns b, a, c; expected a, b among .*{first.name}"):
        read(edges_of(tmp_path), node_features={"x": pattern})


# Parallel edges and numbers


def test_parallel_edges_that_go_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, "e.csv", "src,dst,w\n0,1,1\n0,1,2\n1,0,3\n2,1,4\n2,1,5\n2,1,6\n")
    graph = read(path, edge_features={"w": f"{path}#w"})
    for memory in (1, 200, 1 << 20):
        found = clean_up(graph, tmp_path / "s", undirected=True, memory=memory)
        assert pairs(found) == [(0, 1), (1, 0), (1, 2), (2, 1)]
        assert found.edge_data[ONE]["w"][:].tolist() == [1, 3, 4, 4]
        said = ["3 of 6 edges _N:_E:_N were removed, with their w: an earlier one has the same ends."]
        assert list(found.notes) == said
        assert list(clean_up(graph, tmp_path / "s", remove_duplicates=True, memory=memory).notes) == said
    once = read(file_of(tmp_path, "once.csv", "0,1\n1,0\n1,2\n"))
    assert list(clean_up(once, tmp_path / "s", undirected=True).notes) == []
    assert command("partition", path, "--undirected", "--parts", 1, "--out", tmp_path / "p") == 0
    assert "3 of 6 edges _N:_E:_N were removed: an earlier one has the same ends." in capsys.readouterr().out


def test_numbers_beyond_float32_keep_their_digits(tmp_path: Path) -> None:
    times = [1700000000123.5, 0.25, -3.0]
    path = file_of(tmp_path, "t.txt", "".join(f"{one!r}\n" for one in times))
    graph = read(edges_of(tmp_path), node_features={"time": path})
    assert graph.node_data["_N"]["time"].dtype == np.float64
    assert values(graph, "time") == times
    graph = read(edges_of(tmp_path), node_features={"x": file_of(tmp_path, "x.txt", "0.5\ninf\n-1e5\n")})
    assert graph.node_data["_N"]["x"].dtype == np.float32


# Right input


def test_an_empty_delimiter_in_metadata_is_none(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"s": [0, 1], "d": [1, 0]}), tmp_path / "e.parquet")
    file_of(tmp_path, "x.csv", "0 1\n1 0\n")
    content = {
        "node_type": ["n"], "num_nodes_per_type": [2], "edge_type": ["n:r:n"], "num_edges_per_type": [2],
        "edges": {"n:r:n": {"format": {"name": "parquet", "delimiter": ""}, "data": ["e.parquet"]}},
        "node_data": {"n": {"x": {"format": {"name": "csv", "delimiter": ""}, "data": ["x.csv"]}}},
    }  # fmt: skip
    graph = read(file_of(tmp_path, "metadata.json", json.dumps(content)))
    assert pairs(graph) == [(0, 1), (1, 0)]
    assert graph.node_data["n"]["x"][:].tolist() == [[0, 1], [1, 0]]


def test_missing_labels_are_told_at_once(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.array([0, np.nan, 2], np.float32))
    for options in ({}, {"allow_nan": True}):
        with pytest.raises(PartitionError, match=r"row 1 \(from 0\), has NaN.*\(labels with -1\)\.$"):
            read(edges_of(tmp_path), node_features={"label": tmp_path / "y.npy"}, **options)


def test_parts_of_a_feature_as_integers_and_fractions(tmp_path: Path) -> None:
    parts = [file_of(tmp_path, "x-1.txt", "1\n2\n"), file_of(tmp_path, "x-2.txt", "0.5\n")]
    graph = read(edges_of(tmp_path), node_features={"x": parts})
    assert (values(graph, "x"), graph.node_data["_N"]["x"].dtype) == ([1, 2, 0.5], np.float32)
    for number, part in enumerate([np.array([1, 2], np.int32), np.array([0.5], np.float32)]):
        np.save(tmp_path / f"y-{number}.npy", part)
        pyarrow.parquet.write_table(pyarrow.table({"y": part}), tmp_path / f"y-{number}.parquet")
    for ending in ("npy", "parquet"):
        graph = read(edges_of(tmp_path), node_features={"y": f"{tmp_path}/y-*.{ending}"})
        assert (values(graph, "y"), graph.node_data["_N"]["y"].dtype) == ([1, 2, 0.5], np.float64)
    for number, dtype in enumerate((np.int64, np.uint64)):
        np.save(tmp_path / f"z-{number}.npy", np.array([2**62], dtype))
    with pytest.raises(PartitionError, match=r"uint64; expected .* int64"):
        read(edges_of(tmp_path), node_features={"z": f"{tmp_path}/z-*.npy"})
    table = {"a": np.array([2**62 + 1] * 3), "b": np.array([2**63 + 1] * 3, np.uint64)}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "z.parquet")
    with pytest.raises(PartitionError, match="columns of the types int64, uint64, which no type holds all"):
        read(edges_of(tmp_path), node_features={"z": f"{tmp_path}/z.parquet#a,b"})


def test_names_of_classes(tmp_path: Path) -> None:
    path = file_of(tmp_path, "n.csv", "id,kind,spam\n0,Theory,True\n1,Neural Nets,False\n2,Theory,True\n")
    graph = read(edges_of(tmp_path), node_features={"label": f"{path}#kind", "spam": f"{path}#spam"})
    assert values(graph, "label") == [1, 0, 1]
    assert list(graph.notes) == ["'label': 2 class names were numbered: 0 Neural Nets, 1 Theory."]
    assert graph.node_data["_N"]["spam"].dtype == bool
    assert values(read(edges_of(tmp_path), node_features={"label": f"{path}#spam"}), "label") == [True, False, True]
    pyarrow.parquet.write_table(pyarrow.table({"label": ["b", "a", "b"]}), tmp_path / "n.parquet")
    assert values(read(edges_of(tmp_path), node_features={"label": tmp_path / "n.parquet"}), "label") == [1, 0, 1]
    path.write_text("label\nNeural Nets\nTheory\nTheory\n")
    assert values(read(edges_of(tmp_path), node_features={"label": f"{path}#label"}), "label") == [0, 1, 1]
    path.write_text("label\n1\n2\nx\n")  # a slip of the pen, not three classes
    with pytest.raises(PartitionError, match="line 4, 'x': column label has 'x'; expected a number"):
        read(edges_of(tmp_path), node_features={"label": f"{path}#label"})
    table = file_of(tmp_path, "l.csv", "a,b\nx,y\n")
    with pytest.raises(PartitionError, match="line 2, 'x,y': column a has 'x'; expected a number"):
        read(edges_of(tmp_path), node_features={"label": f"{table}#*"})
    path.write_text("label\na\n2\nx\n")
    both = r"line 2, 'a': column label has 'a'; expected a number.* If these are class names, '2' is none"
    with pytest.raises(PartitionError, match=both):
        read(edges_of(tmp_path), node_features={"label": f"{path}#label"})
    path.write_text("label\nb\n-1\na\n")  # the second node has no label
    assert values(read(edges_of(tmp_path), node_features={"label": f"{path}#label"}), "label") == [1, -1, 0]


def test_ranges_of_columns(tmp_path: Path) -> None:
    path = file_of(tmp_path, "cora.content", "0\t1\t0\t1\tA\n1\t0\t0\t1\tB\n2\t1\t1\t1\tA\n").rename(tmp_path / "c.tsv")
    features = {"feat": f"{path}#1-3", "label": f"{path}#4", "mixed": f"{path}#0,2-3"}
    graph = read(edges_of(tmp_path), node_features=features, header=None)
    assert values(graph, "feat") == [[1, 0, 1], [0, 0, 1], [1, 1, 1]]
    assert values(graph, "mixed") == [[0, 0, 1], [1, 0, 1], [2, 1, 1]]
    assert values(graph, "label") == [0, 1, 0]
    with pytest.raises(ConfigError, match="no column '9'"):
        read(edges_of(tmp_path), node_features={"feat": f"{path}#1-9"})
    with pytest.raises(ConfigError, match="no column '999999999'"):
        read(edges_of(tmp_path), node_features={"feat": f"{path}#0-999999999"})


def test_strings_of_parquet_in_all_forms(tmp_path: Path) -> None:
    for kind in (pyarrow.binary(), pyarrow.large_string(), pyarrow.large_binary(), pyarrow.string_view()):
        ends = {"src": pyarrow.array(["zoë", "b"]).cast(kind), "dst": pyarrow.array(["b", "zoë"]).cast(kind)}
        pyarrow.parquet.write_table(pyarrow.table(ends), tmp_path / "e.parquet")
        assert named(read(tmp_path / "e.parquet", ids="map")) == [("zoë", "b"), ("b", "zoë")]
    pyarrow.parquet.write_table(pyarrow.table({"src": [b"\xff"], "dst": [b"a"]}), tmp_path / "e.parquet")
    with pytest.raises(PartitionError, match="UTF"):
        read(tmp_path / "e.parquet", ids="map")


def test_options_beside_a_whole_graph(tmp_path: Path) -> None:
    graph = GraphSource.homogeneous(np.array([0]), np.array([1]), 2, {})
    whole = write_chunked(graph, tmp_path / "g")
    table = file_of(tmp_path, "n.txt", "name x;label\na b;3\nc d;4\n")
    graph = read(whole, delimiter=";", header=True, node_features={"label": f"{table}#label"})
    assert values(graph, "label") == [3, 4]
    with pytest.raises(ConfigError, match="says itself what is in it"):
        read(whole, delimiter=";")


def test_columns_of_pyg_and_labels_of_one_column_are_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"x": np.ones((3, 5), np.float32), "label": np.array([[0], [3], [1]])}
    graph = GraphSource({"_N": 3}, dict(read(edges_of(tmp_path)).edges), {"_N": fields}, {})
    partition_graph(graph, "g", 1, str(tmp_path / "p"))
    assert command("plan", tmp_path / "p", "--json") == 0
    widths = json.loads(capsys.readouterr().out)["model"]["widths"]
    assert (widths[0], widths[-1]) == (5, 4)


def test_files_without_end_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Packed comments, IDs and class names, far more than there may be."""
    many = gzip.compress(b"#\n" * 3_000_000 + b"0,1\n1,0\n")
    assert pairs(read(file_of(tmp_path, "e.csv.gz", many))) == [(0, 1), (1, 0)]
    with pytest.raises(PartitionError, match="rows for 3 nodes; expected each node once"):
        read(edges_of(tmp_path), train_nodes=file_of(tmp_path, "t.csv.gz", gzip.compress(b"1\n" * 3_000_000)))
    names = "label\n" + "".join(f"class {i}\n" for i in range(70_000))
    with pytest.raises(PartitionError, match="has more than 65536 class names"):
        read(edges_of(tmp_path), node_features={"label": f"{file_of(tmp_path, 'l.csv', names)}#label"})
