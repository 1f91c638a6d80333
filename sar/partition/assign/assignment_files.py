"""Directories that say which part every node belongs to, in the form that DGL's distributed pipeline reads and writes.

One file per node type, `<type>.txt`, with the part of a node on each line, and `partition_meta.json` with the number of
parts and the name of the method.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.id_slices import pieces

META = "partition_meta.json"
_BLOCK = 1 << 22  # bytes read, and lines written, at a time


class Assignment(NamedTuple):
    """Which part every node belongs to."""

    parts: Array  # (N,) int32 from 0 to P - 1, nodes being numbered type after type
    num_parts: int
    algo_name: str  # the method that made it; empty where no file says so


def write_assignment(
    folder: str | PathLike[str], num_nodes: Mapping[str, int], parts: Array, num_parts: int, algo_name: str
) -> None:
    """Write an assignment; the file with the number of parts comes last, when all others are complete.

    The arguments are those of `Assignment`, with the number of nodes of each type. `ConfigError` where a part is out of
    range, the lengths do not fit, or there is an assignment in the directory already.
    """
    folder = Path(folder)
    files = [_type_file(folder, ntype) for ntype in num_nodes]
    if parts.shape != (sum(num_nodes.values()),):
        raise ConfigError(f"parts has shape {parts.shape}; expected ({sum(num_nodes.values())},), a part per node.")
    if len(parts) and not 0 <= parts.min() <= parts.max() < num_parts:
        raise ConfigError(f"parts go from {parts.min()} to {parts.max()}; expected 0 to {num_parts - 1}.")
    taken = [file.name for file in (*files, folder / META) if file.exists()]
    if taken:
        raise ConfigError(f"'{folder}' already holds {', '.join(taken)}, and nothing is overwritten; name another one.")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{part}\n" for part in range(num_parts)]
    for file, of_type in zip(files, _by_type(parts, num_nodes), strict=True):
        with file.open("w", encoding="ascii", newline="\n") as stream:
            for chunk in pieces(len(of_type), _BLOCK):
                stream.writelines(map(lines.__getitem__, of_type[chunk].tolist()))
    meta = {"version": "1.0.0", "num_parts": num_parts, "algo_name": algo_name}
    (folder / META).write_text(json.dumps(meta) + "\n", encoding="utf-8")


def read_assignment(
    folder: str | PathLike[str], num_nodes: Mapping[str, int], num_parts: int | None = None
) -> Assignment:
    """Read an assignment, wherever it was made.

    Only types that have nodes need a file. Without `num_parts`, the number that is expected, `partition_meta.json` has
    to say it. `ConfigError` where a file is missing or has another number of lines than there are nodes, a line is no
    part, or the directory has another number of parts than is expected.
    """
    folder = Path(folder)
    num_parts, algo_name = _read_meta(folder / META, num_parts)
    parts = np.empty(sum(num_nodes.values()), np.int32)
    for ntype, of_type in zip(num_nodes, _by_type(parts, num_nodes), strict=True):
        file = _type_file(folder, ntype)
        if len(of_type) or file.exists():
            _read_parts(file, ntype, num_parts, of_type)
    return Assignment(parts, num_parts, algo_name)


def _type_file(folder: Path, ntype: str) -> Path:
    if not ntype or "/" in ntype or "\0" in ntype:
        raise ConfigError(f"node type '{ntype}' cannot name a file; expected a name without '/'.")
    return folder / f"{ntype}.txt"


def _by_type(parts: Array, num_nodes: Mapping[str, int]) -> list[Array]:
    return np.split(parts, np.cumsum([*num_nodes.values()]))[:-1]


def _read_meta(file: Path, expected: int | None) -> tuple[int, str]:
    """The number of parts, which without a file is the one expected, and the name of the method."""
    try:
        meta = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        if expected is not None:
            return expected, ""
        raise ConfigError(f"there is no file '{file}'; write it, or say the number of parts.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{file}' is not JSON: {error}") from error
    num_parts = meta.get("num_parts") if isinstance(meta, dict) else None
    if not isinstance(num_parts, int) or isinstance(num_parts, bool) or num_parts < 1:
        raise ConfigError(f"'{file}' has num_parts {num_parts!r}; expected a whole number from 1 on.")
    if expected not in (None, num_parts):
        raise ConfigError(f"'{file}' says num_parts {num_parts}; expected {expected}, the parts asked for.")
    return num_parts, str(meta.get("algo_name", ""))


def _read_parts(file: Path, ntype: str, num_parts: int, parts: Array) -> None:
    """Fill `parts`, (N_t,), from the lines of a file."""
    try:
        stream = file.open("rb")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file '{file}' with the parts of the {len(parts)} '{ntype}' nodes.") from error
    done = 0
    with stream:
        while lines := stream.readlines(_BLOCK):
            if done + len(lines) > len(parts):
                raise ConfigError(f"'{file}' has more than {len(parts)} lines; expected one for each '{ntype}' node.")
            try:
                block = np.fromiter(map(int, lines), np.int64, len(lines))
            except (ValueError, OverflowError):
                _refuse(file, done, lines, num_parts)
            if block.min() < 0 or block.max() >= num_parts:
                _refuse(file, done, lines, num_parts)
            parts[done : done + len(lines)] = block
            done += len(lines)
    if done < len(parts):
        raise ConfigError(f"'{file}' has {done} lines; expected {len(parts)}, one for each '{ntype}' node.")


def _refuse(file: Path, done: int, lines: list[bytes], num_parts: int) -> NoReturn:
    """Name the first of these lines that is no part; `done` lines come before them."""
    for number, line in enumerate(lines, start=done + 1):
        try:
            fits = 0 <= int(line) < num_parts
        except ValueError:
            fits = False
        if not fits:
            text = line[:40].decode("ascii", "backslashreplace").strip()
            raise ConfigError(f"'{file}', line {number}: '{text}'; expected a part from 0 to {num_parts - 1}.")
    raise AssertionError("all lines are parts")
