"""Where Numba and LLVM may be touched: `docs/kernels.md` tells a maintainer to look there and nowhere else."""

import ast
from pathlib import Path

import pytest

import sar

ROOT = Path(sar.__file__).parent
INSIDES = ("llvmlite", "numba.core", "numba.extending")


def importers(*modules: str) -> set[str]:
    """Files of sar that import one of these modules or a part of it."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(f"{name}.".startswith(f"{module}.") for name in names for module in modules):
                found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("modules, folder", [(INSIDES, ""), (("numba",), "kernels/")])
def test_only_two_files_compile_and_touch_the_insides_of_numba(modules: tuple[str, ...], folder: str) -> None:
    found = {path for path in importers(*modules) if path.startswith(folder)}
    assert found == {"kernels/compiler.py", "kernels/vectors.py"}
