"""The stand-in for GraphBolt: with fake DGLs of every kind, and with the installed one in a fresh interpreter."""

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sar.adapters.dgl.shim import _StandInFinder, has_dgl, install_shim, require_dgl
from sar.errors import DglError, SarError

TORCH = torch.__version__.split("+")[0]

FAKE_DISTRIBUTED = """
from . import graphbolt as gb

def is_fused(graph):
    return isinstance(graph, gb.FusedCSCSamplingGraph)
"""

FAKE_GRAPHBOLT = """
import pathlib, torch

library = "libgraphbolt_pytorch_" + torch.__version__.split("+")[0] + ".so"
if not (pathlib.Path(__file__).parent / library).exists():
    raise FileNotFoundError(library)

class FusedCSCSamplingGraph: pass
"""


@pytest.fixture
def fake_dgl(tmp_path, monkeypatch):
    """Write a package `dgl` that imports its GraphBolt as DGL 2.1 does; returns a function that gives it libraries."""
    saved = {name: module for name, module in sys.modules.items() if name == "dgl" or name.startswith("dgl.")}
    for name in saved:
        del sys.modules[name]
    monkeypatch.setattr(
        sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, _StandInFinder)]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "dgl"
    (package / "graphbolt" / "impl").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import distributed\n")
    (package / "distributed.py").write_text(FAKE_DISTRIBUTED)
    (package / "graphbolt" / "__init__.py").write_text(FAKE_GRAPHBOLT)
    (package / "graphbolt" / "impl" / "__init__.py").write_text("")

    def with_libraries(*versions: str) -> Path:
        for version in versions:
            (package / "graphbolt" / f"libgraphbolt_pytorch_{version}.so").touch()
        importlib.invalidate_caches()
        return package

    yield with_libraries
    for name in [name for name in sys.modules if name == "dgl" or name.startswith("dgl.")]:
        del sys.modules[name]
    sys.modules.update(saved)


def test_dgl_imports_where_the_library_for_this_torch_is_missing(fake_dgl):
    fake_dgl("2.1.0", "2.0.0")
    install_shim()
    assert "dgl" not in sys.modules
    dgl = importlib.import_module("dgl")
    assert dgl.graphbolt is sys.modules["dgl.graphbolt"]
    assert dgl.distributed.is_fused(object()) is False


@pytest.mark.parametrize(
    "touch",
    [
        "import dgl; dgl.graphbolt.ItemSet",
        "import dgl.graphbolt as gb; gb.load_from_shared_memory('graph')",
        "from dgl.graphbolt.impl import neighbor_sampler",
    ],
)
def test_whoever_touches_graphbolt_is_told_what_is_there_and_what_to_do(fake_dgl, touch):
    fake_dgl("2.1.0", "2.0.0")
    install_shim()
    with pytest.raises(DglError) as error:
        exec(touch, {})
    message = str(error.value)
    assert f"not built for torch {TORCH} (it has libraries for 2.0.0, 2.1.0)" in message
    assert "use_graphbolt=False" in message
    assert isinstance(error.value, ImportError)
    assert isinstance(error.value, SarError)


@pytest.mark.parametrize("libraries", [("2.0.0", TORCH), ()])
def test_a_graphbolt_built_for_this_torch_and_a_dgl_without_one_are_left_alone(fake_dgl, libraries):
    package = fake_dgl(*libraries)
    if not libraries:
        (package / "graphbolt").rename(package / "no_graphbolt")
    install_shim()
    assert not [finder for finder in sys.meta_path if isinstance(finder, _StandInFinder)]
    if libraries:
        assert importlib.import_module("dgl").graphbolt.__file__.endswith("__init__.py")


def test_require_dgl_says_what_failed_and_how_to_mend_it(fake_dgl):
    package = fake_dgl()
    (package / "distributed.py").write_text("raise OSError('libdgl.so: cannot open shared object file')\n")
    with pytest.raises(DglError, match=r"OSError: libdgl.so: cannot open.*pip install 'dgl>=1.1.3,<2.2'") as error:
        require_dgl()
    assert isinstance(error.value.__cause__, OSError)


def test_require_dgl_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(DglError, match="ModuleNotFoundError"):
        require_dgl()


def in_fresh_interpreter(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_import_sar_does_not_import_dgl_and_import_dgl_works_after_it():
    code = """
import sys, sar
assert "dgl" not in sys.modules
import dgl, dgl.data, dgl.dataloading, dgl.distributed, dgl.nn, dgl.sampling
import torch
graph = dgl.graph(([0, 1], [1, 2]))
print(dgl.nn.SAGEConv(4, 2, "mean")(graph, torch.ones(3, 4)).shape[0], type(graph).__name__)
"""
    result = in_fresh_interpreter(code)
    assert result.stdout.split() == ["3", "DGLGraph"], result.stderr


@pytest.mark.skipif(
    not has_dgl() or importlib.metadata.version("dgl").startswith("2."),
    reason="DGL 2 fails to import before sar can help",
)
def test_the_other_order_works_with_dgl_1():
    result = in_fresh_interpreter("import dgl, sar; print(sar.adapters.dgl.shim.require_dgl() is dgl)")
    assert result.stdout.split()[-1:] == ["True"], result.stderr
