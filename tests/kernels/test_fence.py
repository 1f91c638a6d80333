"""Where Numba and LLVM may be touched: `docs/kernels.md` tells a maintainer to look there and nowhere else."""

import ast
from pathlib import Path

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


def test_only_two_files_touch_the_insides_of_numba() -> None:
    assert importers(*INSIDES) == {"kernels/compiler.py", "kernels/vectors.py"}


def test_only_these_compile_kernels() -> None:
    compilers = {"kernels/compiler.py", "kernels/vectors.py"}
    assert {path for path in importers("numba") if path.startswith("kernels/")} == compilers
