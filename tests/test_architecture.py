"""Imports under sar/ run one way, and DGL is imported in one place."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sar
from tests.workers import REPOSITORY

LEVELS = {
    "errors": 0,
    "config": 1,
    "common_tuples": 1,
    "logging_setup": 1,
    "comm": 2,
    "kernels": 2,
    "core": 3,
    "nn": 4,
    "adapters": 5,
    "partition": 6,
    "sampling": 6,
    "train": 7,
    "host": 2,
    "sar": 8,
    "cli": 9,
}
"""A part of sar imports itself and what has a lower level: neither what is above it nor its neighbours."""


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Every module that a file imports, also inside functions and by `importlib.import_module` of a constant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0]
            if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield str(argument.value)


def violations(source: str, path: str) -> list[str]:
    """What a file at `path`, relative to the repository, imports against the rules."""
    *package, name = path.removesuffix(".py").split("/")
    part = package[1] if len(package) > 1 else name
    found = []
    for module in imported_modules(source, ".".join(package)):
        top, *rest = module.split(".")
        if top == "dgl" and package[:3] != ["sar", "adapters", "dgl"]:
            found.append(f"{path} imports {module}; only sar/adapters/dgl imports DGL")
        if top == "sar" and part != "__init__":
            target = rest[0] if rest and rest[0] in LEVELS else "sar"
            if target != part and LEVELS[target] >= LEVELS[part]:
                found.append(f"{path} imports {target}, which is not below {part}")
    return found


@pytest.mark.parametrize(
    "path, source, count",
    [
        ("sar/core/a.py", "from sar.comm.group import Group\nimport sar.kernels\nfrom sar.core.b import c", 0),
        ("sar/core/a.py", "import torch, dgl", 1),
        ("sar/core/a.py", "def f():\n    from dgl import function", 1),
        ("sar/nn/a.py", "import importlib\nimportlib.import_module('dgl.ops')", 1),
        ("sar/adapters/dgl/a.py", "import dgl\nfrom sar.nn import edge_softmax", 0),
        ("sar/adapters/pyg/a.py", "import dgl", 1),
        ("sar/core/a.py", "from sar.nn import edge_softmax", 1),
        ("sar/core/a.py", "from sar import nn", 1),
        ("sar/core/a.py", "from ..nn import edge_softmax", 1),
        ("sar/core/a.py", "from .. import nn", 1),
        ("sar/core/a.py", "from . import frames", 0),
        ("sar/core/a.py", "import sar", 1),
        ("sar/comm/a.py", "from sar.kernels import Op", 1),
        ("sar/comm/a.py", "from sar import config, errors", 0),
        ("sar/cli/a.py", "import sar", 0),
        ("sar/partition/a.py", "from sar.cli import main", 1),
        ("sar/partition/a.py", "from sar.sampling import loader", 1),
        ("sar/config.py", "from sar.errors import ConfigError", 0),
        ("sar/config.py", "from sar.comm import rank", 1),
        ("sar/__init__.py", "from sar.cli import main", 0),
    ],
)
def test_the_rules_are_checked(path, source, count):
    assert len(violations(source, path)) == count, violations(source, path)


def test_imports_run_one_way():
    files = sorted((REPOSITORY / "sar").rglob("*.py"))
    assert {path.relative_to(REPOSITORY / "sar").parts[0].removesuffix(".py") for path in files} <= {
        *LEVELS,
        "__init__",
    }
    assert len(files) > 20
    found = [
        violation
        for path in files
        for violation in violations(path.read_text(), Path(path).relative_to(REPOSITORY).as_posix())
    ]
    assert found == []


def test_importing_sar_imports_neither_dgl_nor_the_compiler():
    code = "import sys, sar; print(sorted({name for name in sys.modules if name.split('.')[0] in ('dgl', 'numba')}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    # The shim for GraphBolt may stand ready; DGL itself may not be there.
    assert set(ast.literal_eval(done.stdout)) <= {"dgl.graphbolt"}


def test_every_public_name_is_there():
    assert [name for name in sar.__all__ if not hasattr(sar, name)] == []
