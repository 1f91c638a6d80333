"""Rows of nodes in files, one a worker, that any number of workers can read back by the nodes' IDs."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.errors import PartitionError

PATTERN = re.compile(r"part-(\d+)-of-(\d+)\.pt")


def save_rows(
    folder: str | os.PathLike[str], node_ids: Tensor, columns: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> None:
    """Write this worker's rows to `part-RANK-of-W.pt`; called by all workers together.

    Every file carries the same random number, by which files of another save are told apart.

    Args:
        folder: where the files go; it is made if need be.
        node_ids: IDs of the rows, (N_i,) int64; on all workers together distinct.
        columns: by name, (N_i, ...) each.
        scalars: numbers by name, the same on all workers.

    Raises:
        PartitionError: where the IDs are not one a row, or the files cannot be written.
    """
    group, folder = session.current_group(), Path(folder)
    with group.guard():
        call = f"saving {sorted(columns)} and {sorted(scalars)}"
        group.agree(call)
        [count] = {len(column) for column in columns.values()}
        if node_ids.shape != (count,) or node_ids.dtype != torch.int64:
            raise PartitionError(f"node_ids is {node_ids.dtype} {tuple(node_ids.shape)}; expected int64 ({count},).")
        save = int(group.all_gather(torch.tensor(secrets.randbits(62)), call)[0])
        file = folder / f"part-{group.rank}-of-{group.world_size}.pt"
        draft = file.with_suffix(".tmp")
        contents = {
            "save": save,
            "node_ids": node_ids.cpu(),
            "columns": {name: column.cpu() for name, column in columns.items()},
            "scalars": dict(scalars),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(contents, draft)
            group.agree(f"{call}: all are written")
            os.replace(draft, file)
            group.agree(f"{call}: all are in place")
            for old in folder.glob("part-*.pt") if group.rank == 0 else ():
                if (match := PATTERN.fullmatch(old.name)) and int(match[2]) != group.world_size:
                    old.unlink()
        except OSError as error:
            raise PartitionError(f"The rows could not be written to {folder}: {error}.") from error


def load_rows(
    folder: str | os.PathLike[str], node_ids: Tensor, names: Sequence[str], width: int, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the rows of this worker's nodes from files of `save_rows`; called by all workers together.

    Args:
        folder: where the files are.
        node_ids: IDs of the wanted rows, (N_i,) int64, distinct.
        names: the wanted columns.
        width: D.
        device: where the rows are wanted.

    Returns:
        Columns by name, (N_i, D) each, and scalars by name.

    Raises:
        PartitionError: where files are missing, damaged, of different saves, of another width, or lack rows.
    """
    group, folder = session.current_group(), Path(folder)
    with group.guard():
        group.agree(f"loading {names} of width {width}")
        wanted, order = node_ids.cpu().sort()
        found = torch.zeros(len(wanted), dtype=torch.bool)
        columns: dict[str, Tensor] = {}
        files = _files(folder, group.rank)
        for number, file in enumerate(files):
            if number and found.all():
                break
            part = _read(file, names, width)
            if number == 0:
                save, scalars = part["save"], part["scalars"]
                columns = {name: part["columns"][name].new_empty(len(wanted), width) for name in names}
            _check_save(file, part["save"], files[0], save)
            rows, place = _matches(part["node_ids"], wanted)
            found[place] = True
            for name, column in columns.items():
                column[order[place]] = part["columns"][name][rows]
        if not found.all():
            raise PartitionError(
                f"{int((~found).sum())} of this worker's {len(wanted)} rows, such as that of node "
                f"{int(wanted[~found][0])}, are in none of {[file.name for file in files]} of {folder}. Let this "
                "worker see the files of all, and name nodes as they were named when the rows were saved."
            )
        for rank, theirs in enumerate(group.all_gather(torch.tensor(save), "loading rows")):
            _check_save(files[0], save, f"what worker {rank} reads", int(theirs))
        return {name: column.to(device) for name, column in columns.items()}, scalars


def _files(folder: Path, first: int) -> list[Path]:
    """The files in a folder, that of rank `first` at the front."""
    found = {file: match for file in folder.glob("part-*.pt") if (match := PATTERN.fullmatch(file.name))}
    totals = sorted({int(match[2]) for match in found.values()})
    if len(totals) != 1:
        raise PartitionError(
            f"{folder} has rows saved by {totals} workers; expected part-RANK-of-W.pt of one number of workers W. "
            "Several are left where saving was interrupted: remove one."
        )
    ranks = {file: int(match[1]) for file, match in found.items()}
    return sorted(ranks, key=lambda file: (ranks[file] != first, ranks[file]))


def _read(file: Path, names: Sequence[str], width: int) -> dict[str, Any]:
    """A file's contents, mapped into memory; nothing in it is executed."""
    try:
        part: dict[str, Any] = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
        columns, ids, _, _ = part["columns"], part["node_ids"], part["save"], part["scalars"]
        shapes = {name: tuple(column.shape) for name, column in columns.items()}
    except Exception as error:  # the unpickler and the reader of the archive raise all sorts
        raise PartitionError(f"{file} is damaged or not made by `save`: {type(error).__name__}: {error}") from error
    expected = (len(ids), width)
    if any(shapes.get(name) != expected for name in names):
        raise PartitionError(
            f"{file} has {shapes}; expected {list(names)} of {expected}. The state of an optimizer is there where "
            "`save` got one of the same kind."
        )
    return part


def _matches(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in `ids` of those that are among ascending `wanted`, and their positions there."""
    if not len(wanted):
        return ids[:0], ids[:0]
    place = torch.searchsorted(wanted, ids).clamp(max=len(wanted) - 1)
    rows = (wanted[place] == ids).nonzero().squeeze(1)
    return rows, place[rows]


def _check_save(file: Path, save: int, other: Path | str, expected: int) -> None:
    if save != expected:
        raise PartitionError(f"{file} and {other} are of different saves; save or copy the folder anew.")
