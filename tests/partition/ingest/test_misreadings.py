"""Files that were read as something else than their author wrote, without a word: read right, told, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sar.errors import ConfigError, PartitionError, SarError
from tests.partition.test_odd_files import ONE, command, edges_of, file_of, named, pairs, read, values

# Part files without rows


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_part_files_without_rows(tmp_path: Path, order: tuple[int, int]) -> None:
    times = [1700000000123456789, 9007199254740993, 2]
    kinds: dict[str, tuple[list[Any], Any]] = {
        "t": (times, pyarrow.int64()), "m": ([True, False, True], pyarrow.bool_()),
        "f": ([[1.0, 2.0]] * 3, pyarrow.list_(pyarrow.float32())),
        "g": ([[1, 2]] * 3, pyarrow.list_(pyarrow.int8(), 2)),
        "d": ([1.5, 2.5, 0.1], pyarrow.float64()),
    }  # fmt: skip
    for number, rows in zip(order, (3, 0), strict=True):
        table = {name: pyarrow.array(column[:rows], kind) for name, (column, kind) in kinds.items()}
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / f"n-{number}.parquet")
        np.save(tmp_path / f"n-{number}.npy", np.array(times[:rows]))
        (tmp_path / f"n-{number}.csv").write_text("t\n" + "".join(f"{one}\n" for one in times[:rows]))
        (tmp_path / f"b-{number}.csv").write_text("true\nfalse\ntrue\n" if rows else "")
    features: dict[str, Any] = {name: f"{tmp_path}/n-*.parquet#{name}" for name in kinds}
    features |= {"u": f"{tmp_path}/n-*.npy", "v": f"{tmp_path}/n-*.csv", "w": f"{tmp_path}/b-*.csv"}
    graph = read(edges_of(tmp_path), node_features=features)
    found = graph.node_data["_N"]
    for name, (column, kind) in kinds.items():
        assert found[name][:].tolist() == column
        dtype = kind.value_type if pyarrow.types.is_list(kind) or name == "g" else kind
        assert found[name].dtype == dtype.to_pandas_dtype()
    assert values(graph, "u") == values(graph, "v") == times
    assert (values(graph, "w"), found["w"].dtype) == ([True, False, True], np.bool_)


def test_no_rows_at_all_keep_the_type_of_the_schema(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"w": pyarrow.array([], pyarrow.int16())}), tmp_path / "w.parquet")
    none = file_of(tmp_path, "none.csv", "src,dst\n")
    graph = read(none, allow_empty=True, num_nodes=2, edge_features={"w": tmp_path / "w.parquet"})
    assert (graph.edge_data[ONE]["w"].shape, graph.edge_data[ONE]["w"].dtype) == ((0,), np.int16)


@pytest.mark.parametrize("large", [2**53 + 1, -(2**53) - 1])
def test_large_integers_do_not_become_fractions(tmp_path: Path, large: int) -> None:
    """Beside a column of fractions, or in another file of the feature."""
    integers, fractions = pyarrow.array([1, large, 3]), pyarrow.array([0.5, 1.5, 2.5])
    pyarrow.parquet.write_table(pyarrow.table({"i": integers, "f": fractions}), tmp_path / "both.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"x": integers[:2]}), tmp_path / "x-0.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"x": fractions[:1]}), tmp_path / "x-1.parquet")
    with pytest.raises(PartitionError, match=r"both.parquet has integers beyond 2\*\*53"):
        read(edges_of(tmp_path), node_features={"x": f"{tmp_path}/both.parquet#i,f"})
    with pytest.raises(PartitionError, match=r"x-0.parquet has integers beyond 2\*\*53"):
        values(read(edges_of(tmp_path), node_features={"x": f"{tmp_path}/x-*.parquet#x"}), "x")
    assert values(read(edges_of(tmp_path), node_features={"x": f"{tmp_path}/both.parquet#i"}), "x") == [1, large, 3]


# Files of one order, and of another


@pytest.fixture
def months(tmp_path: Path) -> list[Path]:
    """Edges and their weights, in files whose order is not that of their names."""
    found = []
    for k, month in enumerate(("jan", "feb", "mar")):
        rows = "".join(f"{k},{(k + 1 + j) % 4},{10 * k + j}\n" for j in range(2))
        found.append(file_of(tmp_path, f"{month}.csv", f"src,dst,w\n{rows}"))
    return found


def test_files_of_features_in_the_order_of_the_edges(months: list[Path]) -> None:
    expected = [0, 1, 10, 11, 20, 21]
    joined = ",".join(map(str, months))
    for files in (f"{joined}#w", [f"{one}#w" for one in months], f"{months[0].parent}/*.csv#w"):
        graph = read(months, edge_features={"w": files})
        assert graph.edge_data[ONE]["w"][:].tolist() == expected
    folder = months[0].parent / "w"
    folder.mkdir()
    for one in months:
        (folder / one.name).write_text(one.read_text())
    assert read(months, edge_features={"w": f"{folder}#w"}).edge_data[ONE]["w"][:].tolist() == expected
    with pytest.raises(ConfigError, match=r"feb.csv.* jan.csv"):
        read(months, edge_features={"w": ",".join(map(str, sorted(months))) + "#w"})
    for number, one in enumerate(sorted(months)):
        (folder / one.name).rename(folder / f"part-{number}.csv")
    with pytest.raises(ConfigError, match=r"part-0.csv.*name the files of both in order"):
        read(months, edge_features={"w": f"{folder}#w"})


def test_rows_of_each_file_are_compared(months: list[Path]) -> None:
    other = file_of(months[0].parent, "w1.txt", "1\n2\n3\n"), file_of(months[0].parent, "w2.txt", "4\n")
    with pytest.raises(PartitionError, match=r"w1.txt has 3 rows; expected 2, as .*jan.csv"):
        read(months[:2], edge_features={"w": list(other)})


def test_files_of_node_features_in_one_order(tmp_path: Path) -> None:
    for k, month in enumerate(("jan", "feb")):
        file_of(tmp_path, f"{month}.csv", f"id,x\nn{2 * k},{2 * k}\nn{2 * k + 1},{2 * k + 1}\n")
    edges = file_of(tmp_path, "e.txt", "src,dst\nn0,n1\nn2,n3\n")
    listed = [f"{tmp_path / month}.csv#id" for month in ("jan", "feb")]
    graph = read(edges, ids="map", node_features={"id": listed, "x": f"{tmp_path}/???.csv#x"})
    assert dict(zip((u for u, _ in named(graph)), (0, 2), strict=True)) == {"n0": 0, "n2": 2}
    assert values(graph, "x") == [0, 1, 2, 3]
    x, y = f"{tmp_path}/jan.csv,{tmp_path}/feb.csv#x", f"{tmp_path}/???.csv#x"
    graph = read(edges_of(tmp_path, 4), node_features={"x": x, "y": y})
    assert values(graph, "x") == values(graph, "y") == [0, 1, 2, 3]


# Delimiters and quotes


@pytest.mark.parametrize(
    "name, content, options",
    [
        ("e.txt", "src\tkind\tdst\nann\tfriend\tbob\nbob\tbest friend\t\ncy\tcousin\tann\n", {"ids": "map"}),
        ("e.csv", "0 1,5\n1 2,5\n", {"ids": "map"}),
        ("e.csv", "0;1;1,5\n1;2;2,5\n", {}),
        ("e.csv", "0\t1,5\n1\t2,5\n", {"ids": "map"}),
        ("e.csv", "ann 1,5\nbob 2,5\n", {"ids": "map", "header": False}),
        ("e.txt", "0 1\t5\n1 2\t6\n", {"ids": "map"}),
        ("e.txt", "0  1\n1  2\n", {}),
        ("e.txt", '"ann lee" bob x\n"cy" dee y\n', {"ids": "map", "header": False, "columns": (1, 2)}),
        ("e.csv", '"Weird Al" Yankovic,Polka\nWeird Al Yankovic,Other\n', {"ids": "map", "header": False}),
        ("e.csv", 'src,dst\n7" single,ann\n', {"ids": "map"}),
        ("e.csv", 'src,dst\nann, "bob"\nbob,ann\n', {"ids": "map"}),
        ("e.csv", 'src,dst\n"ann,bob\n"cy,ann\n', {"ids": "map"}),
        ("e.txt", "src\tdst\n0\t1\n1\t\n", {}),
        ("e.csv", 'src,dst\nann,"b\nob"\n', {"ids": "map"}),
    ],
)
def test_layouts_that_may_be_read_in_two_ways_are_refused(
    tmp_path: Path, name: str, content: str, options: Any
) -> None:
    with pytest.raises(SarError, match=rf"{name}.*(--delimiter|line \d)"):
        read(file_of(tmp_path, name, content), **options)


@pytest.mark.parametrize(
    "name, content, options, expected",
    [
        ("e.tsv", '"Weird Al" Yankovic\tPolka\nWeird Al Yankovic\tOther\n', {"header": False},
         [('"Weird Al" Yankovic', "Polka"), ("Weird Al Yankovic", "Other")]),
        ("e.txt", 'a\t"b"\n"b"\tb, c\n', {"header": False, "delimiter": "\t"}, [("a", '"b"'), ('"b"', "b, c")]),
        ("e.csv", '"a  b","c"\nc,"a b"\n', {"header": False}, [("a  b", "c"), ("c", "a b")]),
        ("e.csv", '"a;b";"say ""hi"""\n"c";d\n', {"header": False}, [("a;b", 'say "hi"'), ("c", "d")]),
        ("e.csv", "Paper ID, Cited Paper\nann lee,bob\n", {"columns": (0, 1), "header": True}, [("ann lee", "bob")]),
        ("e.txt", "src dst\nann bob\n", {}, [("ann", "bob")]),
    ],
)  # fmt: skip
def test_layouts_that_are_read(tmp_path: Path, name: str, content: str, options: Any, expected: Any) -> None:
    assert named(read(file_of(tmp_path, name, content), ids="map", **options)) == expected


def test_a_decimal_comma_names_its_line(tmp_path: Path) -> None:
    rows = "src;dst;w\n0;1;1,5\n1;2;2,5\n2;0;3\n"
    for name, delimiter in (("w.csv", ";"), ("w.txt", " "), ("w.tsv", "\t")):
        path = file_of(tmp_path, name, rows.replace(";", delimiter))
        with pytest.raises(PartitionError, match=rf"{name}, line 2, .*'1,5'.* decimal point"):
            read(path, edge_features={"w": f"{path}#w"})
    single = file_of(tmp_path, "x.csv", "x\n1,5\n2,5\n3\n")
    with pytest.raises(PartitionError, match="line 2, '1,5': 2 fields; expected 1"):
        read(edges_of(tmp_path), node_features={"x": single})


def test_an_empty_line_of_a_single_column_is_a_missing_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (4 << 20, 8):
        monkeypatch.setattr("sar.partition.ingest.text._BLOCK_BYTES", size)
        path = file_of(tmp_path, "label.txt", "1\n3\n" + 20 * "\n" + "2\n\n\n")
        with pytest.raises(PartitionError, match=r"label.txt, line \d+, '': column 0 has .* -1 "):
            read(edges_of(tmp_path), node_features={"label": path})
    assert values(
        read(edges_of(tmp_path, 2), node_features={"label": file_of(tmp_path, "y", "1\n2\n\n")}), "label"
    ) == [1, 2]


# Names of columns


@pytest.mark.parametrize(
    "header", ["target_id,source_id", "dst_node,src_node", "to_id,from_id", "object,subject", "ToNodeId,FromNodeId",
               "dstid,srcid", "receiver,sender", "followee,follower", "cited,citing", "destination,origin",
               ":TO,:FROM", "Target Node,Source Node"]
)  # fmt: skip
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_ends_that_are_named_in_the_other_order(tmp_path: Path, header: str, ending: str) -> None:
    def edges(names: list[str]) -> list[tuple[int, int]]:
        path = tmp_path / f"e.{ending}"
        if ending == "csv":
            path.write_text(f"{','.join(names)}\n1,0\n2,1\n")
        else:
            pyarrow.parquet.write_table(pyarrow.table(dict(zip(names, ([1, 2], [0, 1]), strict=True))), path)
        return pairs(read(path))

    assert edges(header.split(",")) == [(0, 1), (1, 2)]
    assert edges(header.split(",")[::-1]) == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    "header", ["target,id", "id,source", "source_id,source_name", "to,target", "tail,head", "node2,node1", "b,a", "y,x",
               "col,row", "end,start", "src,dst,source,target"]
)  # fmt: skip
def test_names_that_do_not_tell_are_refused(tmp_path: Path, header: str) -> None:
    path = file_of(tmp_path, "e.csv", f"{header}\n1,0{',1,0' * (header.count(',') > 1)}\n")
    with pytest.raises(ConfigError, match=r"e.csv .*--columns"):
        read(path)
    first, second = header.split(",")[:2]
    assert pairs(read(path, columns=(second, first))) == [(0, 1)]


def test_names_of_node_types_tell_and_others_are_said(tmp_path: Path) -> None:
    path = file_of(tmp_path, "e.csv", "item_id,user_id\n1,0\n")
    assert pairs(read({"user:likes:item": path})) == [(0, 1)]
    graph = read(file_of(tmp_path, "f.csv", "person,friend\n1,0\n"))
    assert pairs(graph) == [(1, 0)]
    assert [note for note in graph.notes if "'person'" in note and "sources" in note]


def test_a_header_of_pandas_over_one_column(tmp_path: Path) -> None:
    labels = file_of(tmp_path, "y.csv", "0\n1\n0\n1\n")
    graph = read(edges_of(tmp_path), node_features={"label": labels})
    assert any("y.csv has 4 rows" in note and "--header" in note for note in graph.notes)
    graph = read(edges_of(tmp_path, 4), node_features={"label": labels})
    assert not any("y.csv" in note for note in graph.notes)
    np.save(tmp_path / "e.npy", np.array([[0, 1], [1, 2]] * 2))
    assert any("y.csv has 4 rows" in note for note in read(tmp_path / "e.npy", node_features={"label": labels}).notes)


# Folders and types


def test_files_that_are_not_read_are_told(tmp_path: Path) -> None:
    file_of(tmp_path, "x.csv", "0\n1\n2\n")
    (tmp_path / "a" / "y=2021").mkdir(parents=True)
    file_of(tmp_path / "a", "part-0.csv", "src,dst\n0,1\n1,2\n")
    file_of(tmp_path / "a" / "y=2021", "part-0.csv", "src,dst\n2,3\n")
    for name in ("_edges_b.csv", "_SUCCESS", ".part-0.csv.crc"):
        file_of(tmp_path / "a", name, "")
    graph = read(tmp_path / "a")
    (note,) = [note for note in graph.notes if "y=2021" in note]
    assert f"{tmp_path / 'a'}: files read: 1; entries left out: 4" in note
    assert "_edges_b.csv" in note
    (note,) = read([tmp_path / "a" / "part-0.csv"], node_features={"x": f"{tmp_path}/x*"}).notes or ("",)
    assert note == ""


def test_numbers_in_names_of_files(tmp_path: Path) -> None:
    for name in ("p1²3.csv", "p10.csv", "p2.csv", "p٣.csv"):
        file_of(tmp_path, name, "0,1\n")
    assert read(tmp_path).total_edges == 4


def test_numbers_of_nodes_of_types_that_are_not_there(tmp_path: Path) -> None:
    edges = edges_of(tmp_path)
    for paths, counts in (({"author:writes:paper": edges}, {"author": 5, "papers": 9}), (edges, {"paper": 9})):
        with pytest.raises(ConfigError, match=r"papers?.*no such node type.*expected"):
            read(paths, num_nodes=counts)


# Right input, and advice that can be followed


def test_features_and_lists_without_a_known_ending(tmp_path: Path) -> None:
    feat = file_of(tmp_path, "0.feat", "0 1 0\n1 0 0\n0 0 1\n")
    listed, other = file_of(tmp_path, "train.ids", "1\n2\n"), file_of(tmp_path, "val.json", "0\n")
    np.save(tmp_path / "y.npy", [1, 2, 3])
    (tmp_path / "y.npy").rename(tmp_path / "y")
    pyarrow.parquet.write_table(pyarrow.table({"z": [4, 5, 6]}), tmp_path / "z.snappy")
    features = {"x": f"{feat}#0-2", "y": tmp_path / "y", "z": tmp_path / "z.snappy"}
    graph = read(edges_of(tmp_path), format="text", node_features=features, train_nodes=listed, val_nodes=other)
    assert values(graph, "x") == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert (values(graph, "y"), values(graph, "z")) == ([1, 2, 3], [4, 5, 6])
    assert values(graph, "train_mask") == [False, True, True]
    assert values(graph, "val_mask") == [True, False, False]


def test_a_list_of_quoted_names(tmp_path: Path) -> None:
    edges = file_of(tmp_path, "e.csv", "src,dst\nAda Lovelace,Alan Turing\nAlan Turing,Bob\n")
    for header, options in (("", {"header": False, "columns": ("src", "dst")}), ("name\n", {})):
        listed = file_of(tmp_path, "n.csv", f'{header}"Ada Lovelace"\n"Alan Turing"\n')
        graph = read(edges, ids="map", train_nodes=f"{listed}#name" if header else listed, **options)
        assert sum(values(graph, "train_mask")) == 2


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_column_that_says_train_or_test(tmp_path: Path, ending: str) -> None:
    words = ["train", "test", "val", "train"]
    path = tmp_path / f"n.{ending}"
    if ending == "csv":
        path.write_text("id,split\n" + "".join(f"{i},{word}\n" for i, word in enumerate(words)))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"split": words}), path)
    lists: Any = {f"{name}_nodes": f"{path}#split" for name in ("train", "val", "test")}
    graph = read(edges_of(tmp_path, 4), **lists)
    found = [values(graph, f"{name}_mask") for name in ("train", "val", "test")]
    assert np.array(found).astype(int).tolist() == [[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]]
    with pytest.raises(PartitionError, match=r"4 rows .*expected 5"):
        read(edges_of(tmp_path, 5), **lists)
    path = file_of(tmp_path, "m.csv", "split\ntrain\ntest\ntrain\ntrian\n")
    with pytest.raises(PartitionError, match=r"'trian'.*expected"):
        read(edges_of(tmp_path, 4), train_nodes=f"{path}#split")
    edges = file_of(tmp_path, "e.csv", "src,dst\nann,bob\nbob,ann\n")
    path = file_of(tmp_path, "m.csv", "id,split\nbob,train\nann,test\n")
    with pytest.raises(PartitionError, match="id="):
        read(edges, ids="map", train_nodes=f"{path}#split")
    graph = read(edges, ids="map", node_features={"id": f"{path}#id"}, train_nodes=f"{path}#split")
    assert values(graph, "train_mask") == [True, False]


def test_labels_that_are_missing(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"label": [1, None, 2], "name": ["a", None, "b"]}), tmp_path / "y.parquet"
    )
    text = file_of(tmp_path, "y.csv", "id,label,name\n0,1,a\n1,,\n2,2,b\n")
    for path in (tmp_path / "y.parquet", text):
        for column in ("label", "name"):
            with pytest.raises(PartitionError, match=r"(row 1|line 3).*-1"):
                read(edges_of(tmp_path), node_features={"label": f"{path}#{column}"})


def test_empty_lists_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("", "id\n", "# none\n"):
        with pytest.raises(PartitionError, match=r"t.csv has no node.*leave it out"):
            read(edges_of(tmp_path), train_nodes=file_of(tmp_path, "t.csv", content))
    assert command("partition", edges_of(tmp_path), "--train-nodes", "", "--parts", 1, "--out", tmp_path / "p") == 1
    assert "the name of a file is empty" in capsys.readouterr().err


def test_a_wrong_column_is_named_before_edges_are_read(tmp_path: Path) -> None:
    edges = file_of(tmp_path, "e.csv", "src,dst\nx,y\n")  # no integers
    table = file_of(tmp_path, "t.csv", "a,b\n1,2\n")
    for options in ({"node_features": {"x": f"{table}#c"}}, {"edge_features": {"x": f"{table}#c"}},
                    {"train_nodes": f"{table}#c"}, {"ids": "map", "node_features": {"id": f"{table}#c"}}):  # fmt: skip
        with pytest.raises(ConfigError, match="no column 'c'"):
            read(edges, **options)
    with pytest.raises(PartitionError, match="there is no file"):
        read(edges, edge_features={"x": tmp_path / "missing.csv"})
    with pytest.raises(ConfigError, match="no type for the feature"):
        read(edges, edge_features={"a:b:c/x": f"{table}#a"})


def test_relations_with_slashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = edges_of(tmp_path)
    assert command("partition", f"e:/people/person/nationality:e={edges}", "--parts", 1, "--out", tmp_path / "p") == 1
    assert "e:/people/person/nationality:e" in (said := capsys.readouterr().err)
    assert ".people.person.nationality" in said


def test_messages_name_options_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = file_of(tmp_path, "e.csv", "ann,bob\nbob,cy\n")
    assert command("partition", edges, "--ids", "map", "--parts", 1, "--out", tmp_path / "p") == 1
    assert command("partition", edges, "--parts", 1, "--out", tmp_path / "p") == 1
    said = capsys.readouterr().err
    assert "--header" in said
    assert "header=" not in said
    assert "ids=" not in said
