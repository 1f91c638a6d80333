"""What Python message, reduce and apply functions are given, batches of edges and nodes as in DGL, and give back."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from torch import Tensor

from sar.common_tuples import CanonicalEtype
from sar.errors import GraphError
from sar.logging_setup import logger

Fields = Mapping[str, Tensor]


class RowView(Mapping[str, Tensor]):
    """Fields of some rows, gathered when they are looked up, and remembered.

    Args:
        fields: columns to choose from.
        gather: takes the rows out of a column.
        read: collects the names that were looked up.
    """

    def __init__(self, fields: Fields, gather: Callable[[Tensor], Tensor], read: set[str] | None = None) -> None:
        self._fields = fields
        self._gather = gather
        self._read = read if read is not None else set()
        self._rows: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._rows:
            column = self._fields[key]  # raises the frame's own error
            self._read.add(key)
            self._rows[key] = self._gather(column)
        return self._rows[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class EdgeBatch:
    """The edges that a message function is called with.

    `src`, `dst` and `data` map field names to rows, (E_batch, ...), of the edges' sources, destinations and of
    themselves. `exponentials` is for layers that weigh their messages: see [Note: softmax in a message].
    """

    def __init__(
        self,
        src: Fields,
        dst: Fields,
        data: Fields,
        canonical_etype: CanonicalEtype,
        size: int,
        find_edges: Callable[[], tuple[Tensor, Tensor, Tensor]],
        exponentials: Callable[[Tensor], Tensor] = Tensor.exp,
    ) -> None:
        self.exponentials = exponentials
        self.src = src
        self.dst = dst
        self.data = data
        self.canonical_etype = canonical_etype
        self._size = size
        self._find_edges = find_edges

    def __len__(self) -> int:
        """Number of edges."""
        return self._size

    batch_size = __len__

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Global IDs of sources and destinations, and edge IDs (`_ID`), (E_batch,) int64 each."""
        return self._find_edges()


class NodeBatch:
    """The destination nodes that a reduce or apply function is called with.

    data: fields of the nodes, (N_batch, ...).
    mailbox: messages of each node's in-edges, (N_batch, degree, ...), in the order of `Relation.message_order`.
    """

    def __init__(self, nodes: Tensor, data: Fields, mailbox: Fields | None, ntype: str) -> None:
        self._nodes = nodes
        self.data = data
        self.mailbox = mailbox
        self.ntype = ntype

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    batch_size = __len__

    def nodes(self) -> Tensor:
        """Local IDs, (N_batch,) int64."""
        return self._nodes


def function_name(function: object) -> str:
    """What errors call a Python function."""
    return getattr(function, "__qualname__", repr(function))


def checked_results(function: Callable[..., object], results: object, rows: int) -> Mapping[str, Tensor]:
    """The results of a Python function, if they are a dictionary of tensors with `rows` rows.

    Raises:
        GraphError: otherwise.
    """
    name = function_name(function)
    if not isinstance(results, Mapping):
        raise GraphError(
            f"{name} returned a {type(results).__name__}; expected a dictionary from field name to tensor."
        )
    for field, value in results.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise GraphError(f"{name} returned {field!r} with {shape}; expected a tensor of {rows} rows.")
    return results


def results_on_nothing(
    function: Callable[..., object], call: Callable[[int], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """What a Python function makes of no rows, (0, ...) each; one that cannot take them is shown a row.

    Args:
        function: for the log.
        call: calls it with so many rows.
    """
    try:
        return call(0)
    except Exception as error:
        _log_once(f"{function_name(function)} fails on an empty batch, so it is shown one row: {error!r}")
        try:
            made = call(1)
        except Exception as again:
            raise again from error
        return {name: rows[:0] for name, rows in made.items()}


@lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    logger.info(text)
