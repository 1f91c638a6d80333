"""What Python message, reduce and apply functions get to see: batches of edges and of nodes, as in DGL."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from sar.common_tuples import CanonicalEtype

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
    themselves.
    """

    def __init__(
        self,
        src: Fields,
        dst: Fields,
        data: Fields,
        canonical_etype: CanonicalEtype,
        size: int,
        find_edges: Callable[[], tuple[Tensor, Tensor, Tensor]],
    ) -> None:
        self.src = src
        self.dst = dst
        self.data = data
        self.canonical_etype = canonical_etype
        self._size = size
        self._find_edges = find_edges

    def batch_size(self) -> int:
        """Number of edges."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Global IDs of sources and destinations, and edge IDs (`_ID`), (E_batch,) int64 each."""
        return self._find_edges()


class NodeBatch:
    """The destination nodes that a reduce or apply function is called with.

    data: fields of the nodes, (N_batch, ...).
    mailbox: messages of each node's in-edges in the visible order, (N_batch, degree, ...).
    """

    def __init__(self, nodes: Tensor, data: Fields, mailbox: Fields | None, ntype: str) -> None:
        self._nodes = nodes
        self.data = data
        self.mailbox = mailbox
        self.ntype = ntype

    def batch_size(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> Tensor:
        """Local IDs, (N_batch,) int64."""
        return self._nodes
