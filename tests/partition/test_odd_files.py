"""Files as users have them, which may be read in more than one way: read right, or refused with what to say.

Each row of the tables was once read as something else than its author wrote, without a word.
"""

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from sar.errors import ConfigError, PartitionError, SarError
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import partition_graph
from sar.partition.ingest.cleanup import clean_up
from tests.partition.ingest.sources import (
    command,
    edges_of,
    file_of,
    named,
    only_ends,
    pairs,
    parquet,
    read,
    values,
    weights,
)

# Tables of edges

READ: list[tuple[str, str, dict[str, Any], list[tuple[Any, Any]]]] = [
    # name of the file, content, options, edges
    ("e.csv", "\ufeff# note\r\nsrc,dst\r\n0,1\r\n\r\n1,2\r\n", {}, [(0, 1), (1, 2)]),
    ("e.txt", "# Nodes: 3 Edges: 2\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n", {}, [(0, 1), (1, 2)]),
    ("e.csv", 'name,src,dst\n"x, ""y""",0,1\n"#z",1,"2"\n', {}, [(0, 1), (1, 2)]),
    ("e.csv", '"label, long";src;dst\n"a;b";0;1\n', {}, [(0, 1)]),
    ("e.csv", "src,dst,\n0,1,\n1,2,\n", {}, [(0, 1), (1, 2)]),
    ("e.txt", "0|1\n\n1|2\n", {}, [(0, 1), (1, 2)]),
    ("e.txt", "0\t1\t\n1\t2\t\n", {"columns": (0, 1)}, [(0, 1), (1, 2)]),
    ("e.txt", "src\tnote\tdst\n0\t\t1\n1\tx y\t0\n", {"delimiter": "\t"}, [(0, 1), (1, 0)]),  # an empty field counts
    ("e.csv", "0;1;1,5\n1;2;2,5\n", {"delimiter": ";", "columns": (0, 1)}, [(0, 1), (1, 2)]),
    ("e.csv", "weight,dst,src\n2.5,1,0\n", {"columns": (2, 1)}, [(0, 1)]),
    ("e.csv", "Quelle,Größe,Ziel\n0,9,1\n", {"columns": ("Quelle", "Ziel")}, [(0, 1)]),
    ("e.csv", "Target,Source,Weight\n1,0,5\n", {}, [(0, 1)]),
    ("e.csv", "0,1\n1,2\n", {"header": True, "columns": (0, 1)}, [(1, 2)]),
    ("e.csv", "0x1,0x2\n0x0,0xA\n", {}, [(1, 2), (0, 10)]),  # no header
    ("e.csv", f"0,{2**63 - 2}\n{2**53 + 1} , 007\n\n", {}, [(0, 2**63 - 2), (2**53 + 1, 7)]),
    ("e.csv", "src,dst\n1,a\nb,1\n", {"ids": "map"}, [("1", "a"), ("b", "1")]),  # mixed, so all are strings
    ("e.csv", "from,to\n5,7\n", {"ids": "map"}, [(5, 7)]),
    ("e.csv", f"src,dst\n{2**63},1\n1,{2**64}\n", {"ids": "map"}, [(str(2**63), "1"), ("1", str(2**64))]),
    ("e.csv", f"src,dst\n{2**63 - 1},1\n", {"ids": "map"}, [(2**63 - 1, 1)]),
    ("e.csv", "src,dst\n007,7\n+1,1.0\n", {"ids": "map"}, [("007", "7"), ("+1", "1.0")]),
    ("e.csv", 'src,dst\n"a,b",ü\n日本,"a,b"\n', {"ids": "map"}, [("a,b", "ü"), ("日本", "a,b")]),
    ("e.csv", "src,dst\nNA,null\nnan,True\n", {"ids": "map"}, [("NA", "null"), ("nan", "True")]),
    ("e.csv", "src,dst\n a , b c \n", {"ids": "map"}, [("a", "b c")]),
    ("e.csv", "src,dst\n#cat,#dog\n%x,#cat\n", {"ids": "map"}, [("#cat", "#dog"), ("%x", "#cat")]),
    ("e.csv", "0x1f,0x2a\n0x2a,0x1f\n", {"ids": "map"}, [("0x1f", "0x2a"), ("0x2a", "0x1f")]),
    ("e.csv", "1f,2a\n10,20\n", {"ids": "map"}, [("1f", "2a"), ("10", "20")]),
    ("e.tsv", '"Weird Al" Yankovic\tPolka\nWeird Al\tOther\n', {"ids": "map", "header": False},
     [('"Weird Al" Yankovic', "Polka"), ("Weird Al", "Other")]),
    ("e.txt", 'a\t"b"\n"b"\tb, c\n', {"ids": "map", "header": False, "delimiter": "\t"},
     [("a", '"b"'), ('"b"', "b, c")]),
    ("e.csv", '"a  b","c"\nc,"a b"\n', {"ids": "map", "header": False}, [("a  b", "c"), ("c", "a b")]),
    ("e.csv", '"a;b";"say ""hi"""\n"c";d\n', {"ids": "map", "header": False}, [("a;b", 'say "hi"'), ("c", "d")]),
    ("e.csv", "Paper ID, Cited Paper\nann lee,bob\n", {"ids": "map", "columns": (0, 1), "header": True},
     [("ann lee", "bob")]),
    ("e.txt", "src dst\nann bob\n", {"ids": "map"}, [("ann", "bob")]),
    *((name, f"{header}ann lee\tbob\nbob\tcy d\n", {"ids": "map", "header": bool(header)},
       [("ann lee", "bob"), ("bob", "cy d")])
      for name in ("people.txt", "people.tsv") for header in ("", "src\tdst\n")),
]  # fmt: skip

ASKED = r"begins with .*--header"
REFUSED: list[tuple[str, str | bytes, dict[str, Any], str]] = [  # name of the file, content, options, words
    ("e.csv", "#cat,#dog\nbob,#dog\n", {"ids": "map", "header": False}, ASKED),  # an ID, or a comment
    ("e.csv", "ann,bob\nbob,cy\n", {"ids": "map", "columns": (0, 1)}, ASKED),
    ("e.csv", "ann,bob\nbob,cy\n", {"ids": "map"}, "has the columns ann, bob, .*--no-header"),
    ("e.csv", "src,dst\nann,bo\nbo,\n", {"ids": "map"}, "line 3, 'bo,': column dst has no value"),
    ("e.csv", "src,dst\nann,bo\nbo\n", {"ids": "map"}, "line 3, 'bo': Expected 2 columns, got 1"),
    ("e.csv", "src,dst\n# by hand\n0,1\n", {}, "line 2, '# by hand'"),
    ("e.csv", "0,1\n#1,2\n", {}, "line 2, .*'#1'"),
    ("e.txt", "src dst\nann bob\nbob\tcy d\n", {"ids": "map"}, "line 3, .* a tab .*--delimiter"),
    ("e.txt", "src dst\nann bob\nbob  cy\n", {"ids": "map"}, "line 3, 'bob  cy': Expected 2 columns, got 3"),
    ("e.txt", "0 1\n1  2\n", {"delimiter": " "}, "line 2, '1  2'"),
    ("e.txt", "0 1\n  \n", {"delimiter": " "}, "line 2"),
    ("e.txt", "0  1\n1  2\n", {}, "--delimiter"),
    ("e.txt", "src\tkind\tdst\nann\tfriend\tbob\nbob\tbest friend\t\ncy\tcousin\tann\n", {"ids": "map"}, "line 3"),
    ("e.csv", "0 1,5\n1 2,5\n", {"ids": "map"}, "--delimiter"),
    ("e.csv", "0;1;1,5\n1;2;2,5\n", {}, "--delimiter"),
    ("e.csv", "0\t1,5\n1\t2,5\n", {"ids": "map"}, "--delimiter"),
    ("e.csv", "ann 1,5\nbob 2,5\n", {"ids": "map", "header": False}, "--delimiter"),
    ("e.txt", "0 1\t5\n1 2\t6\n", {"ids": "map"}, "--delimiter"),
    ("e.txt", '"ann lee" bob x\n"cy" dee y\n', {"ids": "map", "header": False, "columns": (1, 2)}, "--delimiter"),
    ("e.txt", "src\tdst\n0\t1\n1\t\n", {}, "line 3"),
    # Quotes that pyarrow would drop, keep, or take to enclose several lines.
    ("e.csv", '"Weird Al" Yankovic,Polka\nWeird Al Yankovic,Other\n', {"ids": "map", "header": False}, "line 1"),
    ("e.csv", 'src,dst\n7" single,ann\n', {"ids": "map"}, "line 2"),
    ("e.csv", 'src,dst\nann, "bob"\nbob,ann\n', {"ids": "map"}, "line 2"),
    ("e.csv", 'src,dst\n"ann,bob\n"cy,ann\n', {"ids": "map"}, "line 2"),
    ("e.csv", 'src,dst\nann,"b\nob"\n', {"ids": "map"}, "line 2"),
    ("e.csv", 'name,src,dst\n"a,0,1\nb,2,3\nc",4,5\n', {}, "line 2, '\"a,0,1'"),
    ("e.csv", 'name,src,dst\n"a,0,1\nb",2,3\n', {}, "line 2"),
    ("e.csv", "0x1,0x2\n0,0x0B\n", {"num_nodes": 11}, "line 2, '0,0x0B': the destination is node 11"),
    ("e.csv", "src,dst\na,b\nc,d\r,\r", {"ids": "map"}, "just CR"),
    ("e.csv", "0,1\r1,2\r", {}, "just CR"),
    ("e.txt", gzip.compress(b"0,1\n", mtime=0), {}, "is packed.*let its name end in .gz"),
    *(("e.txt", content, {}, "is packed, or of another format.*--format")
      for content in (bz2.compress(b"0\n"), b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd\0", b"PAR1..", "0,1".encode("utf-16"))),
    *((f"e.csv{ending}", b"x", {}, "is packed; .*Unpack it") for ending in (".bz2", ".xz", ".zst", ".zip")),
    ("g.npz", b"x", {}, "is an .npz file, which is not read.*sar.partition_graph"),
    *((name, "%%MatrixMarket matrix coordinate pattern\n3 3 1\n2 1\n", options, "is a MatrixMarket file")
      for name, options in (("g.mtx", {}), ("g.mtx.gz", {}), ("g.txt", {}))),
    *(("e.csv", content, {"ids": ids}, "there are no edges of _N:_E:_N")
      for content in ("", "src,dst\n", "# one\n% two\n", "\n\n", "\ufeff") for ids in (None, "map")),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name, content, options, expected", READ)
def test_what_is_read(tmp_path: Path, name: str, content: str, options: Any, expected: Any, packed: bool) -> None:
    data = gzip.compress(content.encode()) if packed else content
    graph = read(file_of(tmp_path, f"{name}{'.gz' * packed}", data), **options)
    assert (named(graph) if "ids" in options else pairs(graph)) == expected


@pytest.mark.parametrize("name, content, options, words", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str, content: Any, options: Any, words: str) -> None:
    with pytest.raises(SarError, match=words):
        read(file_of(tmp_path, name, content), **options)


@pytest.mark.parametrize(
    "header", ["target_id,source_id", "dst_node,src_node", "to_id,from_id", "object,subject", "ToNodeId,FromNodeId",
               "dstid,srcid", "receiver,sender", "followee,follower", "cited,citing", "destination,origin",
               ":TO,:FROM", "Target Node,Source Node"]
)  # fmt: skip
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_ends_that_are_named_in_the_other_order(tmp_path: Path, header: str, ending: str) -> None:
    def edges(names: list[str]) -> list[tuple[int, int]]:
        if ending == "csv":
            return pairs(read(file_of(tmp_path, "e.csv", f"{','.join(names)}\n1,0\n2,1\n")))
        return pairs(read(parquet(tmp_path, "e.parquet", dict(zip(names, ([1, 2], [0, 1]), strict=True)))))

    assert edges(header.split(",")) == [(0, 1), (1, 2)]
    assert edges(header.split(",")[::-1]) == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    "header", ["target,id", "id,source", "source_id,source_name", "to,target", "tail,head", "node2,node1",
               "node_1,node_2", "a,b", "y,x", "col,row", "end,start", "person,friend", "src,dst,source,target"]
)  # fmt: skip
def test_names_that_do_not_tell_are_refused(tmp_path: Path, header: str) -> None:
    path = file_of(tmp_path, "e.csv", f"{header}\n1,0{',1,0' * (header.count(',') > 1)}\n")
    with pytest.raises(ConfigError, match=r"e.csv .*--columns"):
        read(path)
    first, second = header.split(",")[:2]
    assert pairs(read(path, columns=(second, first))) == [(0, 1)]


def test_binary_files_without_edges(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.empty((0, 2), int))
    none = pyarrow.array([], pyarrow.int64())
    for path in (tmp_path / "e.npy", parquet(tmp_path, "e.parquet", {"src": none, "dst": none})):
        with pytest.raises(PartitionError, match="there are no edges"):
            read(path, num_nodes=4)


def test_damage_is_an_error(tmp_path: Path) -> None:
    for content in (b"\0" * 100, bytes(range(256)), b"\x1f\x8b" + b"x" * 50):
        for name in ("e.csv", "e.csv.gz", "e.parquet", "e.npy"):
            for ids in (None, "map"):
                with pytest.raises(SarError):
                    read(file_of(tmp_path, name, content), ids=ids)


def test_options_and_remarks_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, "edges.csv", "0,1\n1,2\n2,0\n")
    assert command("partition", path, "--header", "--columns", 0, 1, "--parts", 2, "--out", tmp_path / "h") == 0
    assert "edges.csv: the first line, 0, 1, was taken for names of columns" in capsys.readouterr().out
    path = file_of(tmp_path, "a.txt", "# by hand\nsrc\tdst\nann\tbob\nbob\tcy d\n")
    arguments = ["--ids", "map", "--parts", 1, "--delimiter", "TAB", "--out", tmp_path / "p"]
    assert command("partition", path, *arguments) == 0
    assert json.loads((tmp_path / "p" / "report.json").read_text())["num_nodes"] == {"_N": 3}
    assert command("partition", f"e:/people/person/nationality:e={path}", "--parts", 1, "--out", tmp_path / "q") == 1
    assert ".people.person.nationality" in capsys.readouterr().err


# Several files


@pytest.fixture
def months(tmp_path: Path) -> list[Path]:
    """Edges and their weights, in files whose order is not that of their names."""
    rows = ["".join(f"{k},{(k + 1 + j) % 4},{10 * k + j}\n" for j in range(2)) for k in range(3)]
    names = zip(("jan", "feb", "mar"), rows, strict=True)
    return [file_of(tmp_path, f"{month}.csv", f"src,dst,w\n{lines}") for month, lines in names]


def test_files_of_features_in_the_order_of_the_edges(months: list[Path]) -> None:
    expected = [0, 1, 10, 11, 20, 21]
    joined = ",".join(map(str, months))
    for files in (f"{joined}#w", [f"{one}#w" for one in months]):
        assert weights(read(months, edge_features={"w": files})) == expected
    folder = months[0].parent / "w"
    folder.mkdir()
    numbered = [file_of(folder, f"{of}-{k}.csv", one.read_text()) for of in "ew" for k, one in enumerate(months)]
    assert weights(read(numbered[:3], edge_features={"w": f"{folder}/w-*.csv#w"})) == expected
    others = [file_of(folder, f"w{k}.txt", "1\n" * k) for k in (3, 2, 1)]
    for edges, files in (
        (months, f"{months[0].parent}/*.csv#w"),
        (months, ",".join(map(str, sorted(months))) + "#w"),
        (months, f"{folder}/w-*.csv#w"),
        (numbered[:3], ",".join(map(str, numbered[:2:-1])) + "#w"),
        (months, others),
    ):
        with pytest.raises(ConfigError, match=r"belong to those of .*Name the files of both in order"):
            read(edges, edge_features={"w": files})


def test_files_of_node_features_in_one_order(tmp_path: Path) -> None:
    for k, month in enumerate(("jan", "feb")):
        file_of(tmp_path, f"{month}.csv", f"id,x\nn{2 * k},{2 * k}\nn{2 * k + 1},{2 * k + 1}\n")
    edges = file_of(tmp_path, "e.txt", "src,dst\nn0,n1\nn2,n3\n")
    listed = [f"{tmp_path / month}.csv#id" for month in ("jan", "feb")]
    with pytest.raises(ConfigError, match=r"feb.csv, jan.csv belong to those of jan.csv, feb.csv"):
        read(edges, ids="map", node_features={"id": listed, "x": f"{tmp_path}/???.csv#x"})
    graph = read(edges, ids="map", node_features={"id": listed, "x": [one.replace("#id", "#x") for one in listed]})
    assert dict(zip((u for u, _ in named(graph)), (0, 2), strict=True)) == {"n0": 0, "n2": 2}
    assert values(graph, "x") == [0, 1, 2, 3]


def test_other_columns_in_a_later_file(tmp_path: Path) -> None:
    first, other = file_of(tmp_path, "a-1.csv", "u,v\n0,1\n"), file_of(tmp_path, "a-2.csv", "v,u\n0,1\n")
    tail = file_of(tmp_path, "a-4.csv", "5,6\n")  # as of a file that was cut into pieces
    assert pairs(read([other, tail])) == [(1, 0), (6, 5)]
    tables = [parquet(tmp_path, f"{names}.parquet", {name: [0] for name in names}) for names in ("uv", "vu")]
    for files in ([first, other], [tail, other], tables):
        with pytest.raises(ConfigError, match=r"has the columns .*; expected .*, as in"):
            read(files)


def test_files_that_are_not_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "a" / "y=2021").mkdir(parents=True)
    file_of(tmp_path / "a", "part-0.csv", "src,dst\n0,1\n1,2\n")
    file_of(tmp_path / "a" / "y=2021", "part-0.csv", "src,dst\n2,3\n")
    for name in ("_edges_b.csv", "_SUCCESS", ".part-0.csv.crc"):
        file_of(tmp_path / "a", name, "")
    (note,) = read(tmp_path / "a").notes
    assert f"{tmp_path / 'a'}: files read: 1; entries left out: 4" in note
    assert "_edges_b.csv" in note


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_part_files_without_rows(tmp_path: Path, order: tuple[int, int]) -> None:
    times = [1700000000123456789, 9007199254740993, 2]
    kinds: dict[str, tuple[list[Any], Any]] = {
        "t": (times, pyarrow.int64()), "m": ([True, False, True], pyarrow.bool_()),
        "f": ([[1.0, 2.0]] * 3, pyarrow.list_(pyarrow.float32())), "d": ([1.5, 2.5, 0.1], pyarrow.float64()),
        "g": ([[1, 2]] * 3, pyarrow.list_(pyarrow.int8(), 2)),
    }  # fmt: skip
    for number, rows in zip(order, (3, 0), strict=True):
        parquet(tmp_path, f"n-{number}.parquet", {name: pyarrow.array(c[:rows], k) for name, (c, k) in kinds.items()})
        np.save(tmp_path / f"n-{number}.npy", np.array(times[:rows]))
        file_of(tmp_path, f"n-{number}.csv", "t\n" + "".join(f"{one}\n" for one in times[:rows]))
    features: dict[str, Any] = {name: f"{tmp_path}/n-*.parquet#{name}" for name in kinds}
    features |= {"u": f"{tmp_path}/n-*.npy", "v": f"{tmp_path}/n-*.csv"}
    graph = read(edges_of(tmp_path), node_features=features)
    for name, (column, kind) in kinds.items():
        found = graph.node_data["_N"][name]
        dtype = kind.value_type if pyarrow.types.is_list(kind) or name == "g" else kind
        assert (found[:].tolist(), found.dtype) == (column, dtype.to_pandas_dtype())
    assert values(graph, "u") == values(graph, "v") == times


# Features: a table (nodes.csv, or in Parquet), what to take of it, and what comes out

FEATURES: list[tuple[Any, str, dict[str, Any], Any]] = [
    (f"x\n1\n{2**53 + 1}\n-3\n", "x", {}, [1, 2**53 + 1, -3]),
    ("x\n1700000000123.5\n0.25\n-3\n", "x", {}, [1700000000123.5, 0.25, -3.0]),  # beyond float32
    ("x,y\n1,0.5\n2,1.5\n3,2.5\n", "*", {}, [[1, 0.5], [2, 1.5], [3, 2.5]]),
    ({"i": [1, 2, 3], "f": [0.5, 1.5, 2.5]}, "i,f", {}, [[1, 0.5], [2, 1.5], [3, 2.5]]),
    ({"i": [1, 2**53 + 1, 3], "f": [0.5, 1.5, 2.5]}, "i", {}, [1, 2**53 + 1, 3]),
    *(({"i": [1, large, 3], "f": [0.5, 1.5, 2.5]}, "i,f", {}, r"integers beyond 2\*\*53")
      for large in (2**53 + 1, -(2**53) - 1)),
    ("spam\nTrue\nFalse\ntrue\n", "spam", {}, [True, False, True]),
    ("-inf\n0.5\n1\n", "0", {"allow_nan": True}, [-np.inf, 0.5, 1]),  # no name
    ("id;x\na,b;1.5\nc,d;2.5\ne,f;3.5\n", "x", {"delimiter": ";"}, "delimiter|columns"),  # which edges.csv has not
    ("0,1,2\n.5,1,1\n.25,2,2\n1,3,3\n", "*", {}, ASKED),  # names of columns, as pandas writes them, or a row
    ("x\n1,5\n2,5\n3\n", "x", {}, "line 2, '1,5': Expected 1 columns, got 2"),
    ("src;dst;x\n0;1;1,5\n1;2;2,5\n2;0;3\n", "x", {}, "line 2, .*'1,5'"),
    ("x\n1\n\n3\n", "x", {}, "line 3, ''"),
    ("x\n1\n2\n3\n\n\n", "x", {}, [1, 2, 3]),
    (f"x\n1\n1\n{2**63}\n", "x", {}, f"line 4, .*'{2**63}'.* 64 bits"),
]  # fmt: skip


@pytest.mark.parametrize("table, selector, options, expected", FEATURES)
def test_features_of_tables(tmp_path: Path, table: Any, selector: str, options: Any, expected: Any) -> None:
    is_text = isinstance(table, str)
    path = file_of(tmp_path, "nodes.csv", table) if is_text else parquet(tmp_path, "nodes.parquet", table)
    features = {"x": f"{path}#{selector}"}
    if isinstance(expected, str):
        with pytest.raises(SarError, match=expected):
            read(edges_of(tmp_path), node_features=features, **options)
    else:
        assert values(read(edges_of(tmp_path), node_features=features, **options), "x") == expected


def test_the_header_option_is_for_every_table(tmp_path: Path) -> None:
    edges, weight = file_of(tmp_path, "e.csv", "0,1\n1,0\n"), file_of(tmp_path, "w.csv", "7\n8\n")
    assert weights(read(edges, header=False, edge_features={"w": weight})) == [7, 8]
    graph = read(edges, header=True, columns=(0, 1), edge_features={"w": weight})
    assert (pairs(graph), weights(graph)) == ([(1, 0)], [8])


def test_a_header_of_pandas_over_one_column(tmp_path: Path) -> None:
    labels = file_of(tmp_path, "y.csv", "0\n1\n0\n1\n")
    graph = read(edges_of(tmp_path), node_features={"label": labels})
    assert any("y.csv has 4 rows" in note and "--header" in note for note in graph.notes)
    graph = read(edges_of(tmp_path, 4), node_features={"label": labels})
    assert not any("y.csv" in note for note in graph.notes)
    with pytest.raises(PartitionError, match=r"y.csv has 4 rows; expected 5.*--header or --no-header"):
        read(edges_of(tmp_path, 3), num_nodes=5, node_features={"label": labels})
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2], [4, 3]]))
    for path in (tmp_path / "e.npy", file_of(tmp_path, "e.csv", "src,dst\n0,1\n3,4\n")):
        with pytest.raises(PartitionError, match=r"is node 4.*number of nodes, 4, is that of the rows of .*y.csv"):
            only_ends(read(path, node_features={"label": labels}))


def test_files_of_a_feature_that_are_not_alike(tmp_path: Path) -> None:
    parts = [file_of(tmp_path, "x-1.txt", "1\n2\n"), file_of(tmp_path, "x-2.txt", "0.5\n")]
    graph = read(edges_of(tmp_path), node_features={"x": parts})
    assert (values(graph, "x"), graph.node_data["_N"]["x"].dtype) == ([1, 2, 0.5], np.float32)
    for number, part in enumerate([np.array([1, 2**53 + 1]), np.array([0.5])]):
        np.save(tmp_path / f"y-{number}.npy", part)
        parquet(tmp_path, f"y-{number}.parquet", {"y": part})
    for ending in ("npy", "parquet"):
        with pytest.raises(PartitionError, match=rf"y-1.{ending}.* rows .*float64.*expected .*int64"):
            read(edges_of(tmp_path), node_features={"y": f"{tmp_path}/y-*.{ending}"})


CLASSES: list[tuple[Any, str, Any]] = [  # labels by a table
    ("id,kind\n0,Theory\n1,Neural Nets\n2,Theory\n", "kind", [1, 0, 1]),
    ("kind\nb\n-1\na\n", "kind", [1, -1, 0]),  # the second node has no label
    ({"label": ["b", "a", "b"]}, "label", [1, 0, 1]),
    ("spam\nTrue\nFalse\nTrue\n", "spam", [True, False, True]),
    ("label\n1\n2\nx\n", "label", "line 4, .*'x'"),  # a slip of the pen, not three classes
    ("label\na\n2\nx\n", "label", "line 2, .*'a'.* If these are class names, '2' is none"),
    ("a,b\nx,y\n", "*", "line 2, .*'x'"),
    ("id,label\n0,1\n1,\n2,2\n", "label", "line 3.* -1 "),
    ("id,label\n0,a\n1,\n2,b\n", "label", "line 3.* -1 "),
    *(({"y": column}, "y", "row 1.* -1 ") for column in ([1, None, 2], ["a", None, "b"])),
]


@pytest.mark.parametrize("table, selector, expected", CLASSES)
def test_names_of_classes(tmp_path: Path, table: Any, selector: str, expected: Any) -> None:
    is_text = isinstance(table, str)
    path = file_of(tmp_path, "n.csv", table) if is_text else parquet(tmp_path, "n.parquet", table)
    features = {"label": f"{path}#{selector}"}
    if isinstance(expected, str):
        with pytest.raises(PartitionError, match=expected):
            read(edges_of(tmp_path), node_features=features)
        return
    graph = read(edges_of(tmp_path), node_features=features)
    assert values(graph, "label") == expected
    if "kind" in table:
        assert "'label': 2 class names were numbered: 0 " in graph.notes[-1]


# Masks and lists of nodes


@pytest.mark.parametrize("mask", [[0, 1, 2], [0.0, 0.5, 1.0], [-1, 0, 1], np.ones((3, 2), bool)])
def test_what_is_no_mask(tmp_path: Path, mask: Any) -> None:
    np.save(tmp_path / "m.npy", mask)
    with pytest.raises(PartitionError, match=r"'_N/train_mask' .* expected a mask "):
        read(edges_of(tmp_path), node_features={"train_mask": tmp_path / "m.npy"})


def test_masks_of_numbers_and_of_words(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.array([[1], [0], [1]], np.uint8))
    words = file_of(tmp_path, "v.txt", "True\nfalse\nFALSE\n")
    graph = read(edges_of(tmp_path), node_features={"train_mask": tmp_path / "m.npy", "val_mask": words})
    assert values(graph, "train_mask") == [1, 0, 1]
    assert values(graph, "val_mask") == [True, False, False]
    assert graph.node_data["_N"]["val_mask"].dtype == bool


def test_lists_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"2\n0\n"))
    np.save(tmp_path / "val.npy", [1])
    test = parquet(tmp_path, "test.parquet", {"node": [3], "x": [1]})
    lists = {"train_nodes": tmp_path / "train.csv.gz", "val_nodes": tmp_path / "val.npy", "test_nodes": f"{test}#node"}
    graph = read(edges_of(tmp_path, 4), **lists)
    found = [values(graph, name) for name in ("train_mask", "val_mask", "test_mask")]
    assert np.array(found).astype(int).tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("listed", ["name\nzoë\nannabel\n", 'name\n"zoë"\n"annabel"\n'])
def test_lists_of_names(tmp_path: Path, listed: str) -> None:
    edges = file_of(tmp_path, "e.csv", "src,dst\nzoë,bob\nbob,annabel\n")
    graph = read(edges, ids="map", train_nodes=f"{file_of(tmp_path, 't.txt', listed)}#name")
    ids = [row.tobytes().rstrip(b"\0").decode() for row in graph.node_data["_N"]["id"][:]]
    assert {one for one, chosen in zip(ids, values(graph, "train_mask"), strict=True) if chosen} == {"zoë", "annabel"}
    file_of(tmp_path, "t.txt", "name,x\nbob,1\ncy,2\n")
    with pytest.raises(PartitionError, match=r"t.txt has the ID 'cy', which no node has"):
        read(edges, ids="map", train_nodes=f"{tmp_path}/t.txt#name")
    sparse = file_of(tmp_path, "s.csv", f"{10**12},5\n5,7\n")
    graph = read(sparse, ids="map", val_nodes=file_of(tmp_path, "v.txt", f"{10**12}\n"))
    assert [values(graph, "id")[i] for i in np.flatnonzero(values(graph, "val_mask"))] == [10**12]


def test_lists_of_nodes_by_type(tmp_path: Path) -> None:
    paths = {"a:to:b": edges_of(tmp_path), "b:to:a": edges_of(tmp_path)}
    listed = file_of(tmp_path, "t.txt", "2\n")
    graph = read(paths, train_nodes={"b": listed})
    assert graph.node_data["b"]["train_mask"][:].tolist() == [False, False, True]
    assert "train_mask" not in graph.node_data["a"]
    with pytest.raises(ConfigError, match="the nodes of train_mask must be by type; expected some of a, b"):
        read(paths, train_nodes=listed)


@pytest.mark.parametrize(
    "content, problem",
    [("0\n3\n", "the ID '3', which no node"), ("-1\n", "the ID '-1'"), ("0\n1\n0\n", "the node '0' more than once"),
     ("0\n1.5\n", "values that are not integers"), ("", "has no node.*leave it out"), ("# none\n", "has no node")],
)  # fmt: skip
def test_lists_that_are_none(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(PartitionError, match=problem):
        read(edges_of(tmp_path), train_nodes=file_of(tmp_path, "t.txt", content))


def test_masks_and_lists_that_were_taken_for_each_other(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.array([True, False, True]))
    with pytest.raises(PartitionError, match="holds bool"):
        read(edges_of(tmp_path), train_nodes=tmp_path / "m.npy")
    with pytest.raises(PartitionError, match=r"has 2 rows; expected 3.*--train-nodes FILE"):
        read(edges_of(tmp_path), num_nodes=3, node_features={"train_mask": file_of(tmp_path, "t.txt", "0\n2\n")})
    with pytest.raises(ConfigError, match="cannot tell the format"):
        read(edges_of(tmp_path), train_nodes=file_of(tmp_path, "train.pt", b"\0"))


# Others


def test_parallel_edges_that_go_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, "e.csv", "src,dst,w\n0,1,1\n0,1,2\n1,0,3\n2,1,4\n2,1,5\n2,1,6\n")
    graph = read(path, edge_features={"w": f"{path}#w"})
    for memory in (1, 200, 1 << 20):
        found = clean_up(graph, tmp_path / "s", undirected=True, memory=memory)
        assert pairs(found) == [(0, 1), (1, 0), (1, 2), (2, 1)]
        assert weights(found) == [1, 3, 4, 4]
        said = ["3 of 6 edges _N:_E:_N were removed, with their w: an earlier one has the same ends."]
        assert list(found.notes) == said
        assert list(clean_up(graph, tmp_path / "s", remove_duplicates=True, memory=memory).notes) == said
    once = read(file_of(tmp_path, "once.csv", "0,1\n1,0\n1,2\n"))
    assert list(clean_up(once, tmp_path / "s", undirected=True).notes) == []
    assert command("partition", path, "--undirected", "--parts", 1, "--out", tmp_path / "p") == 0
    assert "3 of 6 edges _N:_E:_N were removed: an earlier one has the same ends." in capsys.readouterr().out


def test_an_empty_delimiter_in_metadata_is_none(tmp_path: Path) -> None:
    parquet(tmp_path, "e.parquet", {"s": [0, 1], "d": [1, 0]})
    file_of(tmp_path, "x.csv", "0 1\n1 0\n")
    content = {
        "node_type": ["n"], "num_nodes_per_type": [2], "edge_type": ["n:r:n"], "num_edges_per_type": [2],
        "edges": {"n:r:n": {"format": {"name": "parquet", "delimiter": ""}, "data": ["e.parquet"]}},
        "node_data": {"n": {"x": {"format": {"name": "csv", "delimiter": ""}, "data": ["x.csv"]}}},
    }  # fmt: skip
    graph = read(file_of(tmp_path, "metadata.json", json.dumps(content)))
    assert pairs(graph) == [(0, 1), (1, 0)]
    assert graph.node_data["n"]["x"][:].tolist() == [[0, 1], [1, 0]]


def test_numbers_of_nodes_of_types_that_are_not_there(tmp_path: Path) -> None:
    edges = edges_of(tmp_path)
    for paths, counts in (({"author:writes:paper": edges}, {"author": 5, "papers": 9}), (edges, {"paper": 9})):
        with pytest.raises(ConfigError, match=r"papers?.*no such node type.*expected"):
            read(paths, num_nodes=counts)


def test_features_and_lists_without_a_known_ending(tmp_path: Path) -> None:
    feat = file_of(tmp_path, "0.feat", "0 1 0\n1 0 0\n0 0 1\n")
    listed = file_of(tmp_path, "train.ids", "1\n2\n")
    np.save(tmp_path / "y.npy", [1, 2, 3])
    (tmp_path / "y.npy").rename(tmp_path / "y")
    features = {"x": f"{feat}#0-2", "y": tmp_path / "y", "z": parquet(tmp_path, "z.snappy", {"z": [4, 5, 6]})}
    graph = read(edges_of(tmp_path), format="text", node_features=features, train_nodes=listed)
    assert values(graph, "x") == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert (values(graph, "y"), values(graph, "z")) == ([1, 2, 3], [4, 5, 6])
    assert values(graph, "train_mask") == [False, True, True]


def test_a_wrong_column_is_named_before_edges_are_read(tmp_path: Path) -> None:
    edges = file_of(tmp_path, "e.csv", "src,dst\nx,y\n")  # no integers
    table = file_of(tmp_path, "t.csv", "a,b\n1,2\n")
    for options in ({"node_features": {"x": f"{table}#c"}}, {"train_nodes": f"{table}#c"},
                    {"ids": "map", "node_features": {"id": f"{table}#c"}}):  # fmt: skip
        with pytest.raises(ConfigError, match="no column 'c'"):
            read(edges, **options)


def test_strings_of_parquet_in_all_forms(tmp_path: Path) -> None:
    for kind in (pyarrow.binary(), pyarrow.large_string(), pyarrow.large_binary(), pyarrow.string_view()):
        ends = {"src": pyarrow.array(["zoë", "b"]).cast(kind), "dst": pyarrow.array(["b", "zoë"]).cast(kind)}
        assert named(read(parquet(tmp_path, "e.parquet", ends), ids="map")) == [("zoë", "b"), ("b", "zoë")]
    with pytest.raises(PartitionError, match="UTF"):
        read(parquet(tmp_path, "e.parquet", {"src": [b"\xff"], "dst": [b"a"]}), ids="map")


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
