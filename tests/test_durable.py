"""Files put in place, and sums of slices."""

import os
import zlib

import pytest

from sar.durable import SLICE_BYTES, put_in_place, slice_sums


@pytest.mark.parametrize("size", [0, 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES - 1])
def test_every_slice_has_its_sum(tmp_path, size):
    content = bytes(i * 31 % 251 for i in range(size % 1000)) + bytes(size - size % 1000)
    file = tmp_path / "file"
    file.write_bytes(content)
    slices = [content[start : start + SLICE_BYTES] for start in range(0, size, SLICE_BYTES)]
    assert list(slice_sums(file)) == [zlib.crc32(one) for one in slices]


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
