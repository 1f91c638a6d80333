"""Node and edge fields: frames of named columns, and the views that users access."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.common_tuples import CanonicalEtype
from sar.errors import FieldError, GraphError


class Fields(MutableMapping[str, Tensor]):
    """Fields by name: the type of `ndata`, `srcdata`, `dstdata` and `edata`.

    A field is a tensor, (N, ...) or (E, ...). On a graph with several types, users set and read a dictionary from type
    to tensor instead. Its static type is nevertheless a tensor: for type checkers, write
    `g.nodes["paper"].data["h"]`, or `cast("dict[str, Tensor]", g.ndata["h"])["paper"]`.
    """

    @abstractmethod
    def __setitem__(self, key: str, value: Tensor | Mapping[Any, Tensor]) -> None: ...


class Frame(Fields):
    """Fields of one type: columns with one row per node or edge."""

    def __init__(self, rows: int, device: torch.device, what: str, columns: dict[str, Tensor] | None = None) -> None:
        self.rows = rows
        self.device = device
        self.what = what  # description of the rows for errors, such as "source nodes of type 'paper'"
        self._columns: dict[str, Tensor] = dict(columns or {})

    def __getitem__(self, key: str) -> Tensor:
        try:
            return self._columns[key]
        except KeyError:
            names = ", ".join(map(repr, self._columns)) or "none"
            loaded = f" Features of a partition: data['{key}'], data['TYPE/{key}']." if "nodes" in self.what else ""
            raise FieldError(f"There is no field {key!r} on the {self.what}; set there: {names}.{loaded}") from None

    def __setitem__(self, key: str, value: Tensor | Mapping[Any, Tensor]) -> None:
        self._columns[key] = self.check(key, value)

    def check(self, key: str, value: Any) -> Tensor:
        """Return a value that can be set as a field; otherwise raise a GraphError."""
        if not isinstance(value, Tensor):
            raise GraphError(f"Field {key!r} is of type {type(value).__name__}; expected a tensor.")
        if value.layout != torch.strided:
            raise GraphError(f"Field {key!r} is {value.layout}; expected a dense tensor: call .to_dense() on it first.")
        if value.dim() == 0 or value.shape[0] != self.rows:
            raise GraphError(
                f"Field {key!r} has shape {tuple(value.shape)}, but there are {self.rows} {self.what} on this worker; "
                "set one row for each, as a partition's features have."
            )
        if value.device != self.device:
            raise GraphError(f"Field {key!r} is on {value.device}, the graph on {self.device}; move one of them.")
        return value

    def __delitem__(self, key: str) -> None:
        self[key]
        del self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return repr(self._columns)

    def clone(self, device: torch.device | None = None) -> "Frame":
        """A frame with the same columns, on another device if it is passed. Setting fields does not change this one."""
        columns = self._columns if device is None else {k: v.to(device) for k, v in self._columns.items()}
        return Frame(self.rows, device or self.device, self.what, columns)


@dataclass(eq=False, repr=False)
class FieldsByType(Fields):
    """Fields of several types. The value of a name is a dictionary from type to column."""

    _frames: dict[Any, Frame]

    def __getitem__(self, key: str) -> Any:
        columns = {kind: frame[key] for kind, frame in self._frames.items() if key in frame}
        if not columns:
            raise FieldError(f"There is no field {key!r} on any of {list(self._frames)}.")
        return columns

    def __setitem__(self, key: str, value: Tensor | Mapping[Any, Tensor]) -> None:
        if not isinstance(value, Mapping):
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


@dataclass(frozen=True)
class Frames:
    """All frames of a graph by type; `src` and `dst` are the same object, except on message flow graphs."""

    src: dict[str, Frame]
    dst: dict[str, Frame]
    edge: dict[CanonicalEtype, Frame]

    def clone(self, device: torch.device | None = None) -> "Frames":
        """Frames with the same columns, on another device if it is passed. Setting fields does not change these."""
        src = {ntype: frame.clone(device) for ntype, frame in self.src.items()}
        dst = src if self.dst is self.src else {ntype: frame.clone(device) for ntype, frame in self.dst.items()}
        return Frames(src, dst, {etype: frame.clone(device) for etype, frame in self.edge.items()})


def fields_of(frames: Mapping[Any, Frame], kinds: list[Any]) -> Fields:
    """The frame of the only type, or a view of the frames of all types."""
    return frames[kinds[0]] if len(kinds) == 1 else FieldsByType({kind: frames[kind] for kind in kinds})


@dataclass(eq=False, repr=False)
class TypeView:
    """The type of `g.nodes`: `g.nodes[ntype].data` is a frame, and `g.nodes(ntype)` are local IDs.

    `resolve` maps a name, or None, to types, and raises a `FieldError` for an unknown name.
    """

    _frames: Mapping[Any, Frame]
    _resolve: Callable[[Any], list[Any]]

    def __getitem__(self, kind: Any) -> "DataOfType":
        return DataOfType(self._frames[self._resolve(kind)[0]])

    def __call__(self, kind: Any = None) -> Tensor:
        """Local IDs, ascending, (N,) int64."""
        kinds = self._resolve(kind)
        if len(kinds) != 1:
            raise GraphError(f"There are several types; name one of {kinds}.")
        frame = self._frames[kinds[0]]
        return torch.arange(frame.rows, device=frame.device)


@dataclass(frozen=True)
class DataOfType:
    """The type of `g.nodes[ntype]` and `g.edges[etype]`; `data` is the frame."""

    data: Frame
