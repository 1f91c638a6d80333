"""Makes `import dgl` work if DGL's GraphBolt library was not built for the running torch.

DGL 2.1 imports `dgl.graphbolt` from its own start-up code, and that package loads a native library that exists for a
few torch versions only. Nothing else in DGL needs it, so an inert stand-in takes its place.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from sar.errors import DglError

_GRAPHBOLT = "dgl.graphbolt"
_LIBRARY_PREFIX = "graphbolt_pytorch_"


class _StandIn(ModuleType):
    """A module that imports like `dgl.graphbolt` and raises `DglError` for every attribute."""

    class FusedCSCSamplingGraph:
        """Has no instances; DGL tests every graph that it serves for this type."""

    def __init__(self, message: str) -> None:
        super().__init__(_GRAPHBOLT, message)
        self._message = message

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and `inspect` probe these
            raise AttributeError(name)
        raise DglError(self._message)


class _StandInFinder(MetaPathFinder, Loader):
    """Finder for the import of `dgl.graphbolt`. With a finder, Python binds the module to its parent."""

    def __init__(self, message: str) -> None:
        self.message = message

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname == _GRAPHBOLT:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith(_GRAPHBOLT + "."):
            raise DglError(self.message)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(self.message)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install_shim() -> None:
    """Put a stand-in for `dgl.graphbolt` in place if DGL has it without a library for the running torch.

    Does not import DGL, and does nothing once DGL is imported.
    """
    if "dgl" in sys.modules or any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return
    spec = importlib.util.find_spec("dgl")
    if spec is None or spec.origin is None:
        return
    package = Path(spec.origin).parent / "graphbolt"
    if not package.is_dir():
        return
    torch_version = importlib.metadata.version("torch").split("+")[0]
    built_for = sorted(
        file.stem.split(_LIBRARY_PREFIX)[1] for file in package.iterdir() if _LIBRARY_PREFIX in file.name
    )
    if torch_version not in built_for:
        libraries = ", ".join(built_for) or "no version"
        message = (
            f"GraphBolt of the installed DGL was not built for torch {torch_version} (it has libraries for "
            f"{libraries}), so sar has put it out of action; the rest of DGL works. Use DGL without GraphBolt "
            "(sar.DataLoader, dgl.dataloading, use_graphbolt=False), or install a torch that it was built for."
        )
        sys.meta_path.insert(0, _StandInFinder(message))


def has_dgl() -> bool:
    """Whether DGL is installed; it is not imported."""
    return importlib.util.find_spec("dgl") is not None


def require_dgl() -> Any:
    """Import DGL and return it; a `DglError` if it is not installed, or its import fails."""
    install_shim()
    # Without a choice of backend DGL prints a notice and writes one to the home directory.
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("dgl")
    except Exception as error:  # DGL raises OSError, FileNotFoundError, AttributeError and more
        raise DglError(
            f"`import dgl` failed with {type(error).__name__}: {error}. Expected dgl 1.1.3 or 2.1.0; install one with "
            "`pip install 'dgl>=1.1.3,<2.2' packaging pandas`, and import sar before dgl."
        ) from error
