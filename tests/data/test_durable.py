"""Files put in place, and their checksums."""

import os
import random
import zlib

import pytest

from sar.data.checksums import PAGE_BYTES, file_sum
from sar.durable import put_in_place


def by_the_word(data):
    """The sum of a file as its definition says."""
    sums, rest = b"", len(data) // PAGE_BYTES * PAGE_BYTES
    for start in range(0, rest, PAGE_BYTES):
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(start, start + PAGE_BYTES, 8)]
        sums += (sum(words) % 2**64).to_bytes(8, "little")
    return zlib.crc32(sums + data[rest:])


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 1, 9 * PAGE_BYTES - 1])
def test_the_sum_of_a_file(tmp_path, size, monkeypatch):
    monkeypatch.setattr("sar.data.checksums._BUFFER_BYTES", 2 * PAGE_BYTES)
    content = random.Random(size).randbytes(size)
    file = tmp_path / "file"
    file.write_bytes(content)
    assert file_sum(file) == by_the_word(content)


def test_damage_changes_the_sum(tmp_path):
    """Bits, bytes, pages of zeros or in another order, bytes that have moved; of pages and of what is behind them."""
    rng = random.Random(0)
    data = rng.randbytes(5 * PAGE_BYTES + 100)
    damaged = [data[:PAGE_BYTES] + bytes(PAGE_BYTES) + data[2 * PAGE_BYTES :]]
    damaged += [data[PAGE_BYTES : 2 * PAGE_BYTES] + data[:PAGE_BYTES] + data[2 * PAGE_BYTES :], data[1:] + data[:1]]
    damaged += [data[:-1], data[:-100], data + b"\0"]
    for _ in range(200):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(changed))
    file = tmp_path / "file"
    file.write_bytes(data)
    whole = file_sum(file)
    for content in damaged:
        file.write_bytes(content)
        assert file_sum(file) != whole


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
