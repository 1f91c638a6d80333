"""Rows of nodes in the files of a version, by the nodes' IDs: any number of workers can read them back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.errors import CheckpointError
from sar.nn.versions import Version


@dataclass
class Rows:
    """What belongs to the rows of some nodes.

    names: what the node IDs are; rows are found by IDs of the same kind only.
    node_ids: the nodes, (N,) int64, distinct.
    columns: by name, (N, ...) each.
    scalars: numbers by name, the same on all workers.
    """

    names: str
    node_ids: Tensor
    columns: dict[str, Tensor]
    scalars: dict[str, Any]

    def packed(self) -> dict[str, Any]:
        """As a dictionary on the CPU, to be saved by one worker."""
        [length] = {len(column) for column in self.columns.values()}
        if self.node_ids.shape != (length,) or self.node_ids.dtype != torch.int64:
            raise CheckpointError(
                f"node_ids is {self.node_ids.dtype} {tuple(self.node_ids.shape)}; expected int64 ({length},)."
            )
        columns = {name: column.detach().cpu() for name, column in self.columns.items()}
        return {"names": self.names, "node_ids": self.node_ids.cpu(), "columns": columns, "scalars": self.scalars}


def find_rows(version: Version, key: str, wanted: Rows) -> None:
    """Fill in columns and scalars of this worker's nodes from what all workers saved; not a collective call.

    Args:
        version: that has been verified.
        key: which of the `packed` rows, in `part["rows"]`.
        wanted: the rows to find; its columns, on the CPU, are overwritten, and its scalars.

    Raises:
        CheckpointError: where rows are missing, of another width, or named otherwise.
    """
    ids, order = wanted.node_ids.cpu().sort()
    found = torch.zeros(len(ids), dtype=torch.bool)
    first = session.rank() % version.world_size
    for rank in [first, *(rank for rank in range(version.world_size) if rank != first)]:
        if rank != first and found.all():
            break
        saved = version.read_part(rank)["rows"].get(key, {})
        _check(version, saved, wanted)
        wanted.scalars = saved["scalars"]
        _copy_rows(saved, wanted, ids, order, found)
    if not found.all():
        raise CheckpointError(
            f"{int((~found).sum())} of this worker's {len(ids)} rows, such as that of node {int(ids[~found][0])}, are "
            f"not in {version.path}. Name nodes as they were named when the rows were saved."
        )


def _check(version: Version, saved: Mapping[str, Any], wanted: Rows) -> None:
    if not saved:
        raise CheckpointError(f"{version.path} has no rows of these embeddings; load as many as were saved.")
    if saved["names"] != wanted.names:
        raise CheckpointError(
            f"{version.path} has rows by {saved['names']}; this worker asks for them by {wanted.names}. Global IDs "
            "serve for one partitioning only: save with original_ids of the embedding."
        )
    shapes = {name: tuple(column.shape[1:]) for name, column in saved["columns"].items()}
    expected = {name: tuple(column.shape[1:]) for name, column in wanted.columns.items()}
    if any(shapes.get(name) != shape for name, shape in expected.items()):
        raise CheckpointError(
            f"{version.path} has rows of {shapes}; expected {expected}. The state of an optimizer is there where "
            "one of the same kind was saved."
        )


def _copy_rows(saved: Mapping[str, Any], wanted: Rows, ids: Tensor, order: Tensor, found: Tensor) -> None:
    """Copy what a file has of the wanted rows; `ids` are theirs, ascending, `order` their rows, `found` is set."""
    if not len(ids):
        return
    place = torch.searchsorted(ids, saved["node_ids"]).clamp(max=len(ids) - 1)
    rows = (ids[place] == saved["node_ids"]).nonzero().squeeze(1)
    place = place[rows]
    found[place] = True
    for name, column in wanted.columns.items():
        column[order[place]] = saved["columns"][name][rows].to(column.dtype)
