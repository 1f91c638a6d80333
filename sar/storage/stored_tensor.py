"""Tensors in files, read in slices; and the one place where files of a partition directory are opened."""

import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.storage.checked_file import CheckedFile, sums_of

_SLICE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read in slices of rows.

    path, offset: where its values begin.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def slices(self) -> Iterator[tuple[int, Tensor]]:
        """Yield consecutive rows, each time with the number of the first one."""
        step = max(1, _SLICE_BYTES // self.row_bytes) if self.row_bytes else max(1, self.shape[0])
        with open_file(self.path) as file:
            file.seek(self.offset)
            for start in range(0, self.shape[0], step):
                rows = torch.empty((min(step, self.shape[0] - start), *self.shape[1:]), dtype=self.dtype)
                self._fill(file, rows)
                yield start, rows

    def read_into(self, result: Tensor) -> None:
        """Read the whole tensor into one on the CPU, of its own shape and dtype."""
        with open_file(self.path) as file:
            file.seek(self.offset)
            self._fill(file, result)

    def _fill(self, file: BinaryIO, rows: Tensor) -> None:
        if rows.numel() and file.readinto(rows.view(-1).view(torch.uint8).numpy().data) != rows.nbytes:  # type: ignore[attr-defined]
            raise truncated(self.path)


def load(
    stored: StoredTensor,
    device: torch.device | str = "cpu",
    position: Tensor | None = None,
    *,
    empty: Callable[..., Tensor] = torch.empty,
) -> Tensor:
    """Read a tensor to a device slice by slice, row i of the file to row `position[i]` of the result, if given.

    `empty` makes the result, with the arguments of `torch.empty`.
    """
    on_cpu = torch.device(device).type == "cpu"
    result = empty(stored.shape, dtype=stored.dtype, device=device)
    if on_cpu and position is None:
        stored.read_into(result)
        return result
    for start, rows in stored.slices():
        chunk = slice(start, start + len(rows))
        if position is None:
            result[chunk] = rows.to(device)
        else:
            result.index_copy_(0, position[chunk].to(device=device, dtype=torch.int64), rows.to(device))
    return result


def open_file(path: Path, advice: str = "copy it again, or write it again.") -> BinaryIO:
    """Open a file for reading; `advice` says what to do where that is not possible. See [Note: sums while reading].

    Raises:
        PartitionError: it is missing, cannot be read, or is a pipe or a device, which might never end.
    """
    sums = sums_of(path)
    try:
        file = open(path, "rb", -1 if sums is None else 0, opener=_open_at_once)  # noqa: SIM115  the caller closes it
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise PartitionError(f"Cannot read {path} ({reason}); {advice}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise PartitionError(f"{path} is a pipe or a device; expected a file; {advice}")
    return cast(BinaryIO, file if sums is None else CheckedFile(file, sums))


def _open_at_once(name: str, flags: int) -> int:
    """Open without waiting for somebody to write, as opening a pipe does."""
    return os.open(name, flags | os.O_NONBLOCK)


def truncated(path: Path) -> PartitionError:
    """The error for a file that ends too early."""
    return PartitionError(
        f"{path} is truncated: it ends after {path.stat().st_size} bytes, in the middle of a tensor. "
        "Copy it again, or write it again."
    )
