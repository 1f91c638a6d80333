"""Compiled code is kept where every environment finds it, made once for a host, and ahead of use where that works."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sar.kernels import code_cache, compiler, vectors
from sar.kernels.cpu import rows
from tests.workers import REPOSITORY


@pytest.fixture(autouse=True)
def nothing_known():
    for function in (code_cache.digest_of_sources, code_cache.code_folder):
        function.cache_clear()
    yield
    code_cache.code_folder.cache_clear()


def file_of(folder):
    """The name under which code of a function in `folder` is kept."""
    code_cache.digest_of_sources.cache_clear()
    namespace = {}
    exec(compile("def loop(): pass", str(folder / "loops.py"), "exec"), namespace)
    compiled = compiler.compile_cached(namespace["loop"], nogil=True)
    assert Path(compiled._cache.cache_path) == code_cache.code_folder()
    return compiled._cache._impl.filename_base


def test_a_change_in_any_source_gives_the_code_another_name(tmp_path, monkeypatch):
    """In a file beside the kernel, below it, or in one with helpers for all kernels."""
    helper = tmp_path / "helper.txt"
    monkeypatch.setattr(code_cache, "SHARED_SOURCES", (*code_cache.SHARED_SOURCES, helper))
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
    assert Path(module.__file__) in code_cache.SHARED_SOURCES


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
        assert code_cache.code_folder().parent == tmp_path / name
        monkeypatch.setenv(variable, str(file))
        code_cache.code_folder.cache_clear()
    assert code_cache.code_folder().parent == REPOSITORY / "sar" / "kernels" / "__pycache__"


def test_without_a_place_for_it(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    compiled = compiler.compile_cached(lambda: 3)
    assert compiled() == 3
    assert compiled.stats.cache_path is None


def test_what_another_process_compiles_is_awaited_for_some_time(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(code_cache, "WAIT_SECONDS", 1.0)
    with code_cache.compiling("loop"):
        began = time.monotonic()
        with code_cache.compiling("loop"):  # does without the lock
            assert 1.0 <= time.monotonic() - began < 20
        with code_cache.compiling("another"):
            pass
    began = time.monotonic()
    with code_cache.compiling("loop"):
        assert time.monotonic() - began < 1.0


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
    monkeypatch.setattr(code_cache, "WAIT_SECONDS", 0.0)

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

STEPS = "from sar.kernels import ahead; [step() for step in ahead.steps()]"

KILLED = """
import os, time
from sar.kernels import ahead
children, fork = [], os.fork

def noted():
    children.append(fork())
    return children[-1]

os.fork = noted
ahead.compile_ahead()
time.sleep(1)
"""
"""Begins to compile ahead; what follows happens while the children do so."""


def python(script, cache, root=REPOSITORY):
    """What a script prints in a process of its own, by line, with its code in `cache` and its sar from `root`."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd="/",
        env=os.environ | alone | {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(cache), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout.splitlines()


def kernels_in(cache):
    """The kernels whose code is in a cache."""
    return {file.name.split(".")[1].rsplit("-", 2)[0] for file in cache.rglob("*.nbc")}


AGGREGATION = {"add_rows", "_sort_by_column", "accumulate_rows"}
CALLED = AGGREGATION | {"attend", "source_gradients", "project", "project_grad", "head_sums"}


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_the_models_call_and_another_environment_finds_it(tmp_path):
    cache, environment = tmp_path / "cache", tmp_path / "environment"
    python(STEPS, cache)
    assert kernels_in(cache) == CALLED
    assert len(list(cache.rglob("*.nbc"))) == len(CALLED)  # one signature each
    shutil.copytree(REPOSITORY / "sar", environment / "sar", ignore=shutil.ignore_patterns("__pycache__"))
    printed = python(EPOCHS, cache, environment)
    assert [line for line in printed if line.startswith("compiled")] == []


@pytest.mark.slow
def test_training_goes_on_where_compiling_ahead_is_killed(tmp_path):
    printed = python(KILLED + "print(*children, flush=True); os.kill(os.getpid(), 9)", tmp_path)
    pids = [int(pid) for pid in printed[0].split()]
    assert pids
    deadline = time.monotonic() + 5
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []  # they end with their parent
    killed = KILLED + "[os.kill(child, 9) for child in children]"
    printed = python(killed + EPOCHS, tmp_path)
    assert [line for line in printed if line.startswith("sum")] == [
        line for line in python(EPOCHS, tmp_path) if line.startswith("sum")
    ]
    assert kernels_in(tmp_path) == CALLED
