"""Compiled code is kept where every environment finds it, and made again if it cannot be read."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sar.kernels import compiler, vectors
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
    return compiled._cache._impl.filename_base


def test_a_change_in_any_source_gives_the_code_another_name(tmp_path, monkeypatch):
    """In a file beside the kernel, below it, or in one with helpers for all kernels."""
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


@pytest.mark.parametrize("module", (compiler, rows, vectors))
def test_files_with_helpers_for_all_kernels_are_sources(module):
    assert Path(module.__file__) in compiler.SHARED_SOURCES


def test_code_is_kept_for_each_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    cache = compiler.compile_cached(lambda: None)._cache
    keys = [cache._index_key("()", SimpleNamespace(magic_tuple=lambda cpu=cpu: ("x86", cpu))) for cpu in ("old", "new")]
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
    assert compiler.code_folder().parent == REPOSITORY / "sar" / "kernels" / "__pycache__"


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


EPOCHS = """
import sys, torch, sar
from numba.core import event
from sar.adapters.dgl.models import GAT, GraphSAGE

class Compiled(event.Listener):
    def on_start(self, one):
        print("compiled", one.data["dispatcher"].py_func.__name__)
    def on_end(self, one):
        pass

event.register("numba:compile", Compiled())
sar.initialize_comms()
sar.patch_dgl()
nodes = torch.arange(8)
edges = sar.ShardEdgesAndFeatures((nodes.repeat(8), nodes.repeat_interleave(8)), {})
graph = sar.construct_full_graph(sar.PartitionData([edges], [(0, 8)], {}, ["_N"], [("_N", "_E", "_N")]))
torch.manual_seed(0)
for model in (GraphSAGE(8, 3), GAT(8, 3)):
    x = torch.rand(8, 8, requires_grad=True)
    model(graph, x).square().sum().backward()
    print("sum", x.grad.abs().sum().item())
"""
"""Epochs of both models of the demo on one worker; prints what Numba compiles, and what depends on all of it."""


def python(script, cache, root=REPOSITORY):
    """A process with its code in `cache` and its sar from `root`."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = alone | {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(cache), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd="/", env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_that_compile_together_and_another_environment_that_finds_the_code(tmp_path):
    cache, environment = tmp_path / "cache", tmp_path / "environment"
    printed = [process.communicate(timeout=120)[0].splitlines() for process in [python(EPOCHS, cache) for _ in "ab"]]
    sums = [[line for line in lines if line.startswith("sum")] for lines in printed]
    assert sums[0] == sums[1]
    shutil.copytree(REPOSITORY / "sar", environment / "sar", ignore=shutil.ignore_patterns("__pycache__"))
    found = python(EPOCHS, cache, environment).communicate(timeout=120)[0].splitlines()
    assert found == sums[0]  # and nothing was compiled
    assert len(found) == 2
    assert all(file.suffix == ".nbc" for file in cache.rglob("*.nbc*"))
