"""Files put in place, and their checksums."""

import os
import random
import zlib

import pytest

from sar.data.checksums import file_sum
from sar.host.durable import put_in_place


@pytest.mark.parametrize("size", [0, 1, 7, 8, 23])
def test_the_sum_of_a_file(tmp_path, size, monkeypatch):
    monkeypatch.setattr("sar.data.checksums._BUFFER_BYTES", 8)
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    assert file_sum(tmp_path / "file") == zlib.crc32(content)


def test_files_and_directories_get_their_names(tmp_path):
    (tmp_path / "draft").write_text("new")
    (tmp_path / "file").write_text("old")
    put_in_place(tmp_path / "draft", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"
    (tmp_path / "folder.partial").mkdir()
    (tmp_path / "folder").mkdir()
    put_in_place(tmp_path / "folder.partial", tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_bytes_are_on_the_disk_before_the_name_is_and_the_name_before_the_call_returns(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    (tmp_path / "draft").write_text("new")
    put_in_place(tmp_path / "draft", tmp_path / "file")
    assert done == [str(tmp_path / "draft"), str(tmp_path)]
