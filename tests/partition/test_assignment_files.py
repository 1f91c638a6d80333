"""Assignment directories: written and read back, and what is said about damaged ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from sar.errors import ConfigError
from sar.partition.assign import assignment_files
from sar.partition.assign.assignment_files import Assignment, read_assignment, write_assignment

COUNTS = {"author": 3, "paper": 5, "editor": 0}
PARTS = np.array([2, 0, 1, 1, 1, 0, 2, 11], np.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_assignment(tmp_path / "parts", COUNTS, PARTS, 12, "spring")
    return tmp_path / "parts"


def test_files_are_as_documented(folder: Path) -> None:
    assert {file.name: file.read_text() for file in folder.glob("*.txt")} == {
        "author.txt": "2\n0\n1\n",
        "paper.txt": "1\n1\n0\n2\n11\n",
        "editor.txt": "",
    }
    meta = json.loads((folder / "partition_meta.json").read_text())
    assert meta == {"version": "1.0.0", "num_parts": 12, "algo_name": "spring"}


@pytest.mark.parametrize("block", [1, 4, 1 << 20])
def test_read_gives_back_what_was_written(folder: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment_files, "_LINES", block)
    (folder.parent / "again").mkdir()
    write_assignment(folder.parent / "again", COUNTS, PARTS, 12, "spring")
    for where in (folder, folder.parent / "again"):
        parts, num_parts, name = read_assignment(where, COUNTS)
        assert parts.dtype.kind == "i"
        assert np.array_equal(parts, PARTS)
        assert (num_parts, name) == (12, "spring")


def test_files_made_elsewhere(tmp_path: Path) -> None:
    """Windows line ends, no last line end, no meta file and no file for a type without nodes."""
    (tmp_path / "author.txt").write_bytes(b"1\r\n0\r\n1")
    found = read_assignment(tmp_path, {"author": 3, "editor": 0}, num_parts=2)
    assert found.parts.tolist() == [1, 0, 1]
    assert found[1:] == Assignment(found.parts, 2, "")[1:]


@pytest.mark.parametrize(
    "file, content, told",
    [
        (
            "paper.txt",
            "1\n1\n0\n2\n",
            r"paper.txt' has 4 lines of 1 numbers; expected 5 of one, one per 'paper' node",
        ),
        ("paper.txt", "1 1 1 1 1\n", r"paper.txt' has 1 lines of 5 numbers"),
        ("paper.txt", "1\n1\n12\n2\n0\n", r"paper.txt' puts node 2 into part 12; expected 0 to 11"),
        ("paper.txt", "1\n-1\n1\n2\n0\n", r"paper.txt' puts node 1 into part -1"),
        ("paper.txt", "1\n1\n1\n2.0\n0\n", r"is not a list of parts, one per line: .*'2.0' to int64 at row 3"),
        ("paper.txt", "1\n\n1\n2\n0\n", r"paper.txt' has 4 lines of 1 numbers"),
        ("editor.txt", "1\n", r"editor.txt' has 1 lines of 1 numbers; expected 0"),
        ("author.txt", None, r"no file '.*author.txt' with the parts of the 3 'author' nodes"),
        ("partition_meta.json", None, r"no file '.*partition_meta.json'; write it, or pass the number of parts"),
        ("partition_meta.json", "{", r"partition_meta.json' is not JSON"),
        ("partition_meta.json", '{"num_parts": "4"}', r"num_parts '4'"),
    ],
)
def test_damage_is_told(folder: Path, file: str, content: str | None, told: str) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        read_assignment(folder, COUNTS)


def test_another_number_of_parts_is_told(folder: Path) -> None:
    assert read_assignment(folder, COUNTS, num_parts=12).num_parts == 12
    with pytest.raises(ConfigError, match="says num_parts 12; expected 4"):
        read_assignment(folder, COUNTS, num_parts=4)


def test_nothing_is_written_that_cannot_be_read(tmp_path: Path) -> None:
    for counts, parts, told in [
        ({"a": 2}, np.array([0, 2]), "puts node 1 into part 2; expected 0 to 1"),
        ({"a": 2}, np.array([-1, 1]), "puts node 0 into part -1; expected 0 to 1"),
        ({"a": 2}, np.array([0, 1, 1]), r"shape \(3,\) and type int64; expected \(2,\) integers"),
        ({"a/b": 1}, np.array([0]), "node type 'a/b' cannot name a file"),
    ]:
        with pytest.raises(ConfigError, match=told):
            write_assignment(tmp_path / "new", counts, parts, 2, "random")
    assert not (tmp_path / "new").exists()
