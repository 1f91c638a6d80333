"""Imports under sar/ run one way and never in a circle, DGL is imported in one place, and public paths stay."""

import ast
import builtins
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import sar
from tests.workers import REPOSITORY

LEVELS = {
    "errors": 0,
    "removed": 0,
    "config": 1,
    "common_tuples": 1,
    "logging_setup": 1,
    "host": 2,
    "tensors": 3,
    "comm": 4,
    "kernels": 4,
    "data": 5,
    "core": 5,
    "outofcore": 6,
    "nn": 6,
    "adapters": 7,
    "partition": 8,
    "sampling": 9,
    "train": 10,
    "pyg": 11,
    "sar": 11,
    "cli": 12,
    "__main__": 13,
}
"""A part of sar imports itself and what has a lower level: neither what is above it nor its neighbours."""

FACADES = ("sar/__init__.py", "sar/comm/__init__.py", "sar/core/__init__.py", "sar/core/sampling.py")
"""Files of public names and nothing else. They import what they name, wherever it is; only they and cli import them."""

CALLED_AT_IMPORT = {"sar/__init__.py": ["install_shim", "ask_for_huge_pages"]}
"""Calls of sar's own functions that importing a file makes; in general there are none."""


ENGINE = ("comm", "core", "kernels", "outofcore", "nn", "host")
MOST_LINES, MOST_OF_ENGINE, MOST_ENGINE_FUNCTIONS = 34_099, 14_553, 966
"""Lines of sar/ and of the folders of the engine, and functions in these."""


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


def adapters_of(module: str) -> list[str]:
    """["sar", "adapters"] for what is in a folder there, else nothing."""
    parts = module.split(".")
    return parts[:2] if len(parts) > 2 and parts[1] == "adapters" else []


def violations(source: str, path: str) -> list[str]:
    """What a file at `path`, relative to the repository, imports against the rules."""
    *package, name = path.removesuffix(".py").split("/")
    part = package[1] if len(package) > 1 else name
    found = []
    if path in FACADES:
        return found
    for module in imported_modules(source, ".".join(package)):
        top, *rest = module.split(".")
        if top == "dgl" and package[:3] != ["sar", "adapters", "dgl"]:
            found.append(f"{path} imports {module}; only sar/adapters/dgl imports DGL")
        if top == "torch_geometric" and package[:3] != ["sar", "adapters", "pyg"] and path != "sar/pyg.py":
            found.append(f"{path} imports {module}; only sar/adapters/pyg and sar/pyg.py import PyTorch Geometric")
        if package[:2] == adapters_of(module) and module.split(".")[2] != package[2]:
            found.append(f"{path} imports {module}; no adapter imports another")
        if top == "sar":
            target = rest[0] if rest and rest[0] in LEVELS else "sar"
            if target != part and LEVELS[target] >= LEVELS[part]:
                found.append(f"{path} imports {target}, which is not below {part}")
    return found


@pytest.mark.parametrize(
    "path, source, count",
    [
        ("sar/core/a.py", "from sar.comm.group import Group\nimport sar.kernels\nfrom sar.core.b import c", 0),
        ("sar/core/a.py", "def f():\n    from dgl import function", 1),
        ("sar/nn/a.py", "import importlib\nimportlib.import_module('dgl.ops')", 1),
        ("sar/adapters/pyg/a.py", "from sar.adapters.dgl.shim import require_dgl", 1),
        ("sar/sampling/a.py", "from torch_geometric.data import Data", 1),
        ("sar/core/a.py", "from ..nn import edge_softmax", 1),
        ("sar/comm/a.py", "from sar.kernels import Op", 1),
        ("sar/core/__init__.py", "from sar.sampling import DataLoader", 0),
    ],
)
def test_the_rules_are_checked(path, source, count):
    assert len(violations(source, path)) == count, violations(source, path)


def module_files() -> dict[str, Path]:
    """Every file of sar by the name of its module."""
    files = {}
    for path in sorted((REPOSITORY / "sar").rglob("*.py")):
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return files


def imports_between(files: dict[str, Path]) -> dict[str, set[str]]:
    """The files that each file imports, by module name, also inside functions and for type checkers only."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        package = ".".join(path.relative_to(REPOSITORY).parts[:-1])
        graph[name] = set()
        for imported in imported_modules(path.read_text(), package):
            while imported and imported not in files:  # a name in a module
                imported = imported.rpartition(".")[0]
            graph[name] |= {imported} - {name, ""}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that lead from one to the next and back to the first; empty where there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def calls_at_import(source: str) -> list[str]:
    """What importing a file does to other files of sar: functions it calls, attributes it sets."""
    tree = ast.parse(source)
    ours = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name or "").split(".")[0] == "sar"
    }
    done = []
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            touched = [node.value.func]
        elif isinstance(node, ast.Assign):
            touched = [target for target in node.targets if isinstance(target, ast.Attribute | ast.Subscript)]
        else:
            continue
        for expression in touched:
            root = expression
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ours:
                done.append(ast.unparse(expression))
    return done


def test_no_file_imports_itself_through_others():
    files = module_files()
    graph = imports_between(files)
    assert graph["sar.core.graph.graph"] >= {"sar.core.graph.frames", "sar.core.relation"}
    assert circle(graph) == []


def test_nothing_is_registered_with_other_files_on_import():
    found = {
        path.relative_to(REPOSITORY).as_posix(): calls_at_import(path.read_text()) for path in module_files().values()
    }
    assert {path: calls for path, calls in found.items() if calls} == CALLED_AT_IMPORT


def test_facades_are_imported_by_facades_and_the_command_only():
    files = module_files()
    modules = {name for name, path in files.items() if path.relative_to(REPOSITORY).as_posix() in FACADES}
    assert len(modules) == len(FACADES)
    importers = {name for name, imported in imports_between(files).items() if imported & modules}
    assert {name for name in importers if not name.startswith("sar.cli")} <= modules


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


def test_importing_sar_and_inspecting_imports_neither_dgl_nor_the_compiler():
    modules = "{name for name in sys.modules if name.split('.')[0] in ('dgl', 'numba', 'torch_geometric')}"
    # `sar.core.sampling` is there without an import of its own, as scripts written for SAR use it.
    code = f"import sys, sar, sar.cli.inspect; sar.core.sampling.DataLoader; print(sorted({modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    # The shim for GraphBolt may stand ready; DGL itself may not be there.
    assert set(ast.literal_eval(done.stdout)) <= {"dgl.graphbolt"}


def test_partitioning_and_inspecting_import_no_torch(tmp_path):
    """It would take most of their time on a small graph."""
    np.save(tmp_path / "edges.npy", np.arange(40).reshape(20, 2))
    np.save(tmp_path / "feat.npy", np.ones((40, 3)))
    code = "import sys; from sar.cli import main\nprint(main(sys.argv[1:]), {'torch', 'numba'} & {*sys.modules})"
    options = ["edges.npy", "--node-feature", "feat=feat.npy", "--split", "0.6,0.2,0.2", "--parts", "2", "--out", "g"]
    for loaded, command in (({"numba"}, ["partition", *options]), (set(), ["inspect", "g", "--verify"])):
        done = subprocess.run(
            [sys.executable, "-c", code, *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.endswith(f"0 {loaded}\n"), done.stdout + done.stderr


def test_help_and_wrong_options_import_no_library():
    code = "import sys; from sar.cli import main\ntry: main(sys.argv[1:])\nfinally: print(sorted(sys.modules))"
    for arguments in (["--help"], ["partition", "--nope"], ["plan", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "usage: sar" in done.stdout + done.stderr
        loaded = {name.partition(".")[0] for name in ast.literal_eval(done.stdout.splitlines()[-1])}
        assert not loaded & {"torch", "numpy", "numba", "pyarrow", "tqdm"}, arguments


GRAPHS = ["DistributedBlock", "GraphShardManager", "HeteroGraphShardManager", "construct_full_graph", "construct_mfgs"]
COMMUNICATION = [
    *("all_reduce", "all_to_all", "exchange_single_tensor", "exchange_tensors"),
    *("backend", "comm_device", "is_initialized", "master_ip", "master_port", "rank", "world_size"),
    *("gather_grads", "initialize_comms", "nfs_ip_init", "sync_params"),
]
PUBLIC_PATHS = {
    "sar": [
        *GRAPHS,
        *("Config", "comm_device", "gather_grads", "initialize_comms", "logger", "logging_setup", "nfs_ip_init"),
        *("rank", "sync_params", "world_size"),
        *("PartitionData", "ShardEdgesAndFeatures", "load_dgl_partition_data", "suffix_key_lookup"),
        *("convert_dist_graph", "edge_softmax", "message_has_parameters", "DistributedBN1D"),
        *("patch_dgl", "patched_edge_softmax", "RelGraphConv", "DataLoader", "DistNeighborSampler"),
        *("comm", "common_tuples", "core"),
    ],
    "sar.core": GRAPHS,
    "sar.core.sampling": ["DataLoader", "DistNeighborSampler"],
    "sar.comm": COMMUNICATION,
    "sar.common_tuples": ["PartitionData", "ShardEdgesAndFeatures"],
}
"""The paths and names on which scripts written for SAR rely."""


@pytest.mark.parametrize("path", PUBLIC_PATHS)
def test_public_import_paths_stay(path):
    module = importlib.import_module(path)
    assert [name for name in PUBLIC_PATHS[path] if not hasattr(module, name)] == []
    if path != "sar":
        assert [
            name
            for name in PUBLIC_PATHS[path]
            if getattr(module, name) is not getattr(sar, name, getattr(module, name))
        ] == []


def test_names_for_type_checkers_are_those_that_are_imported_when_used():
    tree = ast.parse(Path(sar.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module != "sar"]
    told = {alias.name: node.module for node in imports for alias in node.names}
    assert told.keys() == sar._MODULE_OF.keys()
    assert all(getattr(importlib.import_module(module), name) is getattr(sar, name) for name, module in told.items())


def test_every_public_name_is_there():
    assert [name for name in sar.__all__ if not hasattr(sar, name)] == []
    assert {*sar.__all__, "nn", "print"} <= set(dir(sar))


def test_a_star_import_leaves_the_names_of_python_and_torch():
    assert {*sar.__all__} & {*dir(builtins), "nn", "optim", "F"} == set()


def test_the_code_stays_within_its_budget(capsys):
    lines, functions = Counter(), Counter()
    for path in (REPOSITORY / "sar").rglob("*.py"):
        source, folder = path.read_text(), path.relative_to(REPOSITORY / "sar").parts[0]
        lines[folder] += source.count("\n")
        functions[folder] += sum(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(source)))
    with capsys.disabled():
        print("\nlines:", ", ".join(f"{folder} {count}" for folder, count in lines.most_common() if "." not in folder))
    assert lines.total() <= MOST_LINES
    assert sum(lines[folder] for folder in ENGINE) <= MOST_OF_ENGINE
    assert sum(functions[folder] for folder in ENGINE) <= MOST_ENGINE_FUNCTIONS
