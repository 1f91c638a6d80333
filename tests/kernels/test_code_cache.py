"""Compiled code is kept where every environment finds it, and made again if it cannot be read."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sar.host import compiler
from sar.kernels import vectors
from sar.kernels.cpu import rows
from tests.workers import REPOSITORY


@pytest.fixture(autouse=True)
def nothing_known():
    for function in (compiler.digest_of_sources, compiler.code_folder):
        function.cache_clear()
    yield
    compiler.code_folder.cache_clear()


def file_of(folder):
    """The name under which code of a function in `folder` is kept."""
    compiler.digest_of_sources.cache_clear()
    namespace = {}
    exec(compile("def loop(): pass", str(folder / "loops.py"), "exec"), namespace)
    compiled = compiler.compile_cached(namespace["loop"], nogil=True)
    assert Path(compiled._cache.cache_path) == compiler.code_folder()
    return compiled._cache.name


def test_a_change_in_any_source_gives_the_code_another_name(tmp_path, monkeypatch):
    """In a file beside the kernel, below it, or in one with helpers for all kernels."""
    assert {Path(module.__file__) for module in (compiler, rows, vectors)} < set(compiler.SHARED_SOURCES)
    helper = tmp_path / "helper.txt"
    monkeypatch.setattr(compiler, "SHARED_SOURCES", (*compiler.SHARED_SOURCES, helper))
    folder = tmp_path / "kernels"
    (folder / "below").mkdir(parents=True)
    names = []
    for path in (helper, folder / "more.py", folder / "below/more.py", helper):
        path.write_text(f"x = {len(names)}")
        names.append(file_of(folder))
    assert len(set(names)) == 4
    assert all(name.startswith("loops.loop-") for name in names)
    assert file_of(folder) == names[-1]


def test_code_is_kept_for_each_processor():
    cache = compiler.compile_cached(lambda: None)._cache
    keys = [cache.key("()", SimpleNamespace(magic_tuple=lambda cpu=cpu: ("x86", cpu))) for cpu in ("old", "new")]
    assert keys[0] != keys[1]


def test_code_goes_to_the_first_folder_that_can_be_written(tmp_path, monkeypatch):
    file = tmp_path / "no folder"
    file.touch()
    places = [("NUMBA_CACHE_DIR", "given"), ("XDG_CACHE_HOME", "user")]
    for variable, name in places:
        monkeypatch.setenv(variable, str(tmp_path / name))
    for variable, name in places:
        assert compiler.code_folder().parent == tmp_path / name
        monkeypatch.setenv(variable, str(file))
        compiler.code_folder.cache_clear()
    assert compiler.code_folder().parent == REPOSITORY / "sar" / "__pycache__"


def test_without_a_place_for_it(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    compiled = compiler.compile_cached(lambda: 3)
    assert compiled() == 3
    assert compiled.stats.cache_path is None


DAMAGES = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "zeros for its end": lambda content: content[:-512] + bytes(512),
    "noise": lambda content: bytes(range(256)) * 20,
    "of another signature": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(tmp_path, monkeypatch, damage):
    """After a power cut files may be empty, or have zeros for their last blocks."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def add(one, other):
        return one + other

    def results():
        compiled = compiler.compile_cached(add)
        return [compiled(1, 2), compiled(1.5, 2.5)], sum(compiled.stats.cache_misses.values())

    assert results() == ([3, 4.0], 2)
    assert results() == ([3, 4.0], 0)
    files = sorted(tmp_path.rglob("*.nbc"))
    assert len(files) == 2
    before = [file.read_bytes() for file in files]
    for file, content in zip(files, before[::-1], strict=True):
        file.write_bytes(content if damage == "of another signature" else DAMAGES[damage](file.read_bytes()))
    assert results() == ([3, 4.0], 2)
    assert results() == ([3, 4.0], 0)
    assert sorted(tmp_path.rglob("*.nb*")) == files
