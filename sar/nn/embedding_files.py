"""Rows of nodes in files, one a worker, that any number of workers can read back by the nodes' IDs."""

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.errors import PartitionError

PATTERN = re.compile(r"part-(\d+)-of-(\d+)\.pt")


@dataclass
class Rows:
    """What belongs to the rows of some nodes.

    node_ids: the nodes, (N,) int64, distinct.
    columns: by name, (N, ...) each.
    scalars: numbers by name, the same on all workers.
    """

    node_ids: Tensor
    columns: dict[str, Tensor]
    scalars: dict[str, Any]


def save_rows(folder: str | os.PathLike[str], rows: Rows) -> None:
    """Write this worker's rows to `part-RANK-of-W.pt`; called by all workers together.

    Every file carries the same random number, by which files of another save are told apart.

    Args:
        folder: where the files go; it is made if need be.
        rows: of no node that another worker has too.

    Raises:
        PartitionError: where the IDs are not one a row, or the files cannot be written.
    """
    group, folder = session.current_group(), Path(folder)
    ids = rows.node_ids
    with group.guard():
        call = f"saving {sorted(rows.columns)} and {sorted(rows.scalars)}"
        group.agree(call)
        [count] = {len(column) for column in rows.columns.values()}
        if ids.shape != (count,) or ids.dtype != torch.int64:
            raise PartitionError(f"node_ids is {ids.dtype} {tuple(ids.shape)}; expected int64 ({count},).")
        save = int(group.all_gather(torch.tensor(secrets.randbits(62)), call)[0])
        file = folder / f"part-{group.rank}-of-{group.world_size}.pt"
        draft = file.with_suffix(".tmp")
        columns = {name: column.cpu() for name, column in rows.columns.items()}
        contents = {"save": save, "node_ids": ids.cpu(), "columns": columns, "scalars": rows.scalars}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(contents, draft)
            group.agree(f"{call}: all are written")
            os.replace(draft, file)
            group.agree(f"{call}: all are in place")
            if group.rank == 0:
                for old, (_, world_size) in _files(folder).items():
                    if world_size != group.world_size:
                        old.unlink()
        except OSError as error:
            raise PartitionError(f"The rows could not be written to {folder}: {error}.") from error


def load_rows(folder: str | os.PathLike[str], node_ids: Tensor, names: Sequence[str], width: int) -> Rows:
    """Read the rows of this worker's nodes from files of `save_rows`; called by all workers together.

    Args:
        folder: where the files are.
        node_ids: IDs of the wanted rows, (N_i,) int64, distinct.
        names: the wanted columns.
        width: D.

    Returns:
        The rows of these nodes, in their order and on the CPU, with columns (N_i, D).

    Raises:
        PartitionError: where files are missing, damaged, of different saves, of another width, or lack rows.
    """
    group, folder = session.current_group(), Path(folder)
    with group.guard():
        group.agree(f"loading {names} of width {width}")
        ids, order = node_ids.cpu().sort()
        found = torch.zeros(len(ids), dtype=torch.bool)
        first, *others = _files_in_turn(folder, group.rank)
        save, part = _read(first, names, width)
        wanted = Rows(node_ids, {name: part.columns[name].new_empty(len(ids), width) for name in names}, part.scalars)
        _copy_rows(part, wanted, ids, order, found)
        for file in others:
            if found.all():
                break
            theirs, part = _read(file, names, width)
            _check_save(file, theirs, first, save)
            _copy_rows(part, wanted, ids, order, found)
        if not found.all():
            raise PartitionError(
                f"{int((~found).sum())} of this worker's {len(ids)} rows, such as that of node {int(ids[~found][0])}, "
                f"are in none of {[file.name for file in (first, *others)]} of {folder}. Let this worker see the files "
                "of all, and name nodes as they were named when the rows were saved."
            )
        for rank, number in enumerate(group.all_gather(torch.tensor(save), "loading rows")):
            _check_save(first, save, f"what worker {rank} reads", int(number))
        return wanted


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """The files in a folder, with the rank and the number of workers in their names."""
    found = {}
    for file in folder.glob("part-*.pt"):
        if match := PATTERN.fullmatch(file.name):
            found[file] = (int(match[1]), int(match[2]))
    return found


def _files_in_turn(folder: Path, first: int) -> list[Path]:
    """The files in a folder, that of rank `first` at the front."""
    files = _files(folder)
    totals = sorted({world_size for _, world_size in files.values()})
    if len(totals) != 1:
        raise PartitionError(
            f"{folder} has rows saved by {totals} workers; expected part-RANK-of-W.pt of one number of workers W. "
            "Several are left where saving was interrupted: remove one."
        )
    return sorted(files, key=lambda file: (files[file][0] != first, files[file][0]))


def _read(file: Path, names: Sequence[str], width: int) -> tuple[int, Rows]:
    """The number of a file's save, and its rows, mapped into memory; nothing in it is executed."""
    try:
        contents = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
        save = contents["save"]
        rows = Rows(contents["node_ids"], contents["columns"], contents["scalars"])
        shapes = {name: tuple(column.shape) for name, column in rows.columns.items()}
        expected = (len(rows.node_ids), width)
    except Exception as error:  # the unpickler and the reader of the archive raise all sorts
        raise PartitionError(f"{file} is damaged or not made by `save`: {type(error).__name__}: {error}") from error
    if any(shapes.get(name) != expected for name in names):
        raise PartitionError(
            f"{file} has {shapes}; expected {list(names)} of {expected}. The state of an optimizer is there where "
            "`save` got one of the same kind."
        )
    return save, rows


def _copy_rows(part: Rows, wanted: Rows, ids: Tensor, order: Tensor, found: Tensor) -> None:
    """Copy what a file has of the wanted rows; `ids` are theirs, ascending, `order` their rows, `found` is set."""
    if not len(ids):
        return
    place = torch.searchsorted(ids, part.node_ids).clamp(max=len(ids) - 1)
    rows = (ids[place] == part.node_ids).nonzero().squeeze(1)
    place = place[rows]
    found[place] = True
    for name, column in wanted.columns.items():
        column[order[place]] = part.columns[name][rows]


def _check_save(file: Path, save: int, other: Path | str, expected: int) -> None:
    if save != expected:
        raise PartitionError(f"{file} and {other} are of different saves; save or copy the folder anew.")
