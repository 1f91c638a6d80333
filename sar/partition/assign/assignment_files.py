"""Reads and writes assignments, the part of every node, in the format of DGL's distributed pipeline.

A directory has `<type>.txt` for each node type, with the part of a node on each line, and `partition_meta.json` with
the number of parts and the name of the method.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.graph_source import check_parts
from sar.tensors.id_arrays import pieces

META = "partition_meta.json"
_LINES = 1 << 20  # written at a time


class Assignment(NamedTuple):
    """Which part every node belongs to."""

    parts: Array  # (N,) int64 from 0 to P - 1, in order of node types
    num_parts: int
    algo_name: str  # the method; empty if the files do not name it


def write_assignment(
    folder: str | PathLike[str], num_nodes: Mapping[str, int], parts: Array, num_parts: int, algo_name: str
) -> None:
    """Write an assignment. The arguments are the fields of `Assignment` and the number of nodes of each type."""
    folder = Path(folder)
    check_parts(parts, sum(num_nodes.values()), num_parts, "the assignment")
    files = [_type_file(folder, ntype) for ntype in num_nodes]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{part}\n" for part in range(num_parts)]
    for file, of_type in zip(files, _by_type(parts, num_nodes).values(), strict=True):
        with file.open("w", encoding="ascii", newline="\n") as opened:
            for chunk in pieces(len(of_type), _LINES):  # ten times faster than numpy.savetxt
                opened.writelines(map(lines.__getitem__, of_type[chunk].tolist()))
    meta = {"version": "1.0.0", "num_parts": num_parts, "algo_name": algo_name}
    (folder / META).write_text(json.dumps(meta) + "\n", encoding="utf-8")


def read_assignment(
    folder: str | PathLike[str], num_nodes: Mapping[str, int], num_parts: int | None = None
) -> Assignment:
    """Read an assignment from sar, DGL or any other program.

    Types without nodes need no file. `num_parts` is the expected number of parts; None reads it from
    `partition_meta.json`. Raises `ConfigError` if a file is missing, does not have one part per node, or has another
    number of parts.
    """
    folder = Path(folder)
    num_parts, algo_name = _read_meta(folder / META, num_parts)
    parts = np.empty(sum(num_nodes.values()), np.int64)
    for ntype, of_type in _by_type(parts, num_nodes).items():
        file = _type_file(folder, ntype)
        if len(of_type) and not file.exists():
            raise ConfigError(f"there is no file '{file}' with the parts of the {len(of_type)} '{ntype}' nodes.")
        table = np.empty((0, 1), np.int64)
        try:
            if file.exists() and file.stat().st_size:
                table = np.loadtxt(file, np.int64, comments=None, ndmin=2, encoding="utf-8")
        except ValueError as error:
            raise ConfigError(f"'{file}' is not a list of parts, one per line: {error}") from error
        if table.shape != (len(of_type), 1):
            found = f"{len(table)} lines of {table.shape[1]} numbers"
            raise ConfigError(f"'{file}' has {found}; expected {len(of_type)} of one, one per '{ntype}' node.")
        check_parts(table[:, 0], len(of_type), num_parts, f"'{file}'")
        of_type[:] = table[:, 0]
    return Assignment(parts, num_parts, algo_name)


def _type_file(folder: Path, ntype: str) -> Path:
    if not ntype or "/" in ntype or "\0" in ntype:
        raise ConfigError(f"node type '{ntype}' cannot name a file; expected a name without '/'.")
    return folder / f"{ntype}.txt"


def _by_type(parts: Array, num_nodes: Mapping[str, int]) -> dict[str, Array]:
    return dict(zip(num_nodes, np.split(parts, np.cumsum([*num_nodes.values()]))[:-1], strict=True))


def _read_meta(file: Path, expected: int | None) -> tuple[int, str]:
    """The number of parts (without a file, the expected one) and the name of the method."""
    try:
        meta = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        if expected is not None:
            return expected, ""
        raise ConfigError(f"there is no file '{file}'; write it, or pass the number of parts.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{file}' is not JSON: {error}") from error
    num_parts = meta.get("num_parts") if isinstance(meta, dict) else None
    if not isinstance(num_parts, int) or isinstance(num_parts, bool) or num_parts < 1:
        raise ConfigError(f"'{file}' has num_parts {num_parts!r}; expected a whole number from 1 on.")
    if expected not in (None, num_parts):
        raise ConfigError(f"'{file}' says num_parts {num_parts}; expected {expected}, the parts asked for.")
    return num_parts, str(meta.get("algo_name", ""))
