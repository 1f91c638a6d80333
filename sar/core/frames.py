"""Node and edge frames: named columns of equal length, and the mappings through which users see them."""

from collections.abc import Iterator, MutableMapping

import torch
from torch import Tensor

from sar.errors import FieldError, GraphError


class Frame(MutableMapping[str, Tensor]):
    """Columns with one row per node or edge.

    Args:
        rows: length of every column.
        device: where the columns are.
        what: what a row is, for error messages, such as `source nodes of type 'paper'`.
        columns: initial columns.
    """

    def __init__(self, rows: int, device: torch.device, what: str, columns: dict[str, Tensor] | None = None) -> None:
        self.rows = rows
        self.device = device
        self.what = what
        self._columns: dict[str, Tensor] = dict(columns or {})

    def __getitem__(self, key: str) -> Tensor:
        try:
            return self._columns[key]
        except KeyError:
            known = ", ".join(map(repr, self._columns)) or "none"
            raise FieldError(f"There is no field {key!r} on the {self.what}; set there: {known}.") from None

    def __setitem__(self, key: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise GraphError(f"Field {key!r} is a {type(value).__name__}; expected a tensor.")
        if value.dim() == 0 or value.shape[0] != self.rows:
            raise GraphError(
                f"Field {key!r} has shape {tuple(value.shape)}, but there are {self.rows} {self.what} on this worker; "
                "set one row for each."
            )
        if value.device != self.device:
            raise GraphError(f"Field {key!r} is on {value.device}, the graph on {self.device}; move one of them.")
        self._columns[key] = value

    def __delitem__(self, key: str) -> None:
        self[key]
        del self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return repr(self._columns)

    def clone(self) -> "Frame":
        """The same columns under a mapping of its own."""
        return Frame(self.rows, self.device, self.what, self._columns)

    def to(self, device: torch.device) -> "Frame":
        """The frame with its columns on another device."""
        return Frame(self.rows, device, self.what, {k: v.to(device) for k, v in self._columns.items()})


class TypedFrames(MutableMapping[str, dict[object, Tensor]]):
    """What `srcdata`, `dstdata`, `ndata` and `edata` are on a graph with several types: name -> {type: column}."""

    def __init__(self, frames: dict[object, Frame]) -> None:
        self._frames = frames

    def __getitem__(self, key: str) -> dict[object, Tensor]:
        found = {kind: frame[key] for kind, frame in self._frames.items() if key in frame}
        if not found:
            raise FieldError(f"There is no field {key!r} on any of {list(self._frames)}.")
        return found

    def __setitem__(self, key: str, value: dict[object, Tensor]) -> None:
        if not isinstance(value, dict):
            raise GraphError(f"The graph has several types; set {key!r} to a dictionary from type to tensor.")
        for kind, column in value.items():
            if kind not in self._frames:
                raise FieldError(f"There is no type {kind!r}; expected one of {list(self._frames)}.")
            self._frames[kind][key] = column

    def __delitem__(self, key: str) -> None:
        for kind in self[key]:
            del self._frames[kind][key]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for frame in self._frames.values() for key in frame))

    def __len__(self) -> int:
        return len(list(iter(self)))
