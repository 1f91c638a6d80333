"""Rows of any nodes by global ID, fetched from the workers that own them, with gradients on their way back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.comm.group import Group
from sar.core.collective import Collective, Made
from sar.core.eager import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.errors import GraphError
from sar.kernels import accumulation_dtype


class RowOwners:
    """Which worker owns the row of each node of a type, and where.

    Args:
        graph: the whole graph.
        ntype: node type; may be left out where there is one.

    Raises:
        GraphError: for message flow graphs, or where the type is not named among several.
        FieldError: for an unknown type.

    Attributes:
        node_ids: the global IDs of this worker's nodes, (N_i,) int64, ascending, in the order of their rows.
    """

    def __init__(self, graph: GraphShardManager, ntype: str | None) -> None:
        if graph.is_block:
            raise GraphError("A message flow graph has only some of the nodes; give the whole graph.")
        self.node_ids = graph.node_ids(ntype)
        self.ntype = ntype or "nodes"
        self._ends = torch.tensor([end for _, end in graph.node_ranges])

    def checked(self, node_ids: Tensor) -> Tensor:
        """IDs as int64 on the CPU, once it is sure that somebody owns them."""
        if node_ids.dim() != 1 or (node_ids.numel() and node_ids.dtype not in (torch.int64, torch.int32)):
            raise GraphError(
                f"The nodes are {node_ids.dtype} {tuple(node_ids.shape)}; expected global IDs, (K,) int64."
            )
        ids, bound = node_ids.detach().cpu().long(), int(self._ends[-1])
        outside = ids[(ids < 0) | (ids >= bound)]
        if len(outside):
            raise GraphError(
                f"{len(outside)} of the IDs, such as {int(outside[0])}, are not of the graph's nodes; expected global "
                f"IDs from 0 to {bound - 1}."
            )
        return ids

    def split(self, ids: Tensor, values: Tensor) -> list[Tensor]:
        """Values of ascending `ids`, (K,), as one piece for each worker."""
        ends = torch.searchsorted(ids, self._ends)
        return list(values.split(ends.diff(prepend=ends.new_zeros(1)).tolist()))

    def sort(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """Positions in `ids`, (K,), by the worker that owns the node, else in order; and how many each worker has."""
        owners = torch.searchsorted(self._ends, ids, right=True)
        return owners.argsort(stable=True), owners.bincount(minlength=len(self._ends)).tolist()

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of this worker's nodes, by global ID.

        Raises:
            GraphError: for nodes of another type.
        """
        ids = ids.to(self.node_ids.device)
        rows = torch.searchsorted(self.node_ids, ids)
        found = self.node_ids[rows.clamp(max=max(len(self.node_ids) - 1, 0))] == ids if len(self.node_ids) else rows < 0
        if not bool(found.all()):
            raise GraphError(f"A worker asked for node {int(ids[~found][0])}, which is not of the type {self.ntype!r}.")
        return rows


@uncompiled
def fetch_rows(graph: GraphShardManager, tensor: Tensor, node_ids: Tensor, ntype: str | None = None) -> Tensor:
    """The rows of any nodes, of a tensor of which every worker has those of its own; called by all workers together.

    Each row travels once to each worker that asks for it, however often. In the backward their gradients travel back
    and are added up.

    Args:
        graph: the whole graph.
        tensor: (N_i, ...), a row for each of this worker's nodes of the type; equal dtype and width on all workers.
        node_ids: global IDs, (K,) int64, also of other workers' nodes, also repeated; may be empty.
        ntype: node type; may be left out where there is one.

    Returns:
        (K, ...), on the device of `tensor`.

    Raises:
        GraphError: for a tensor of another length, IDs that are not of nodes of this type, or a message flow graph.
    """
    group = session.current_group()
    with group.guard():
        owners = RowOwners(graph, ntype)
        if tensor.dim() == 0 or len(tensor) != len(owners.node_ids):
            raise GraphError(
                f"The tensor has shape {tuple(tensor.shape)}; expected {len(owners.node_ids)} rows, one for each of "
                f"this worker's {owners.ntype}."
            )
        wanted = owners.checked(node_ids)
    return _Fetch(group, owners, tensor, wanted).apply(tensor)[0]


class _Fetch(Collective):
    def __init__(self, group: Group, owners: RowOwners, tensor: Tensor, node_ids: Tensor) -> None:
        super().__init__(group, f"fetch_rows of {owners.ntype}, {tensor.dtype} {list(tensor.shape[1:])}")
        self.owners = owners
        self.shape = tensor.shape
        self.wanted, self.place = node_ids.unique(return_inverse=True)
        self.asked: Sequence[Tensor] = []

    def forward(self, tensor: Tensor) -> Made:
        asked = exchange_tensors(self.owners.split(self.wanted, self.wanted))
        self.asked = [self.owners.rows(ids) for ids in asked]
        rows = torch.cat(exchange_tensors([tensor[rows] for rows in self.asked])).to(tensor.device)
        self.place = self.place.to(tensor.device)
        return Made((rows[self.place],))

    def backward(self, saved: list[Tensor | None], *grads: Tensor) -> tuple[Tensor]:
        grad = grads[0].to(accumulation_dtype(grads[0].dtype))
        sums = grad.new_zeros(len(self.wanted), *self.shape[1:]).index_add_(0, self.place, grad)
        total = grad.new_zeros(self.shape)
        arrived = exchange_tensors(self.owners.split(self.wanted, sums))
        for rows, theirs in zip(self.asked, arrived, strict=True):
            total.index_add_(0, rows, theirs.to(total.device))
        return (total,)
