"""Learnable embeddings of nodes, each row on the worker that owns its node.

[Note: lookups and gradients]
The rows are not parameters of the model, because workers have different ones: `sync_params`, `gather_grads` and
`DistributedDataParallel`, which work on parameters, would mix them up. `SparseAdam` and `SparseAdagrad` update them.

`emb()` returns this worker's rows themselves; a distributed graph makes their gradient whole. `emb(node_ids)` fetches
the rows of any nodes, each once: one message with IDs to every owner, one with rows back. The fetched rows are a leaf
of autograd, so the backward communicates nothing, and a worker with an empty batch may leave it out. Leaves that a
backward has reached are remembered. The optimizer's step sums their gradients at the rows' owners, and so knows which
rows were used.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.core.eager import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.attention import SEED_STEP
from sar.errors import CheckpointError, ConfigError, GraphError
from sar.kernels import accumulation_dtype
from sar.nn.fetch_rows import RowOwners
from sar.nn.node_rows import Rows, find_rows
from sar.nn.versions import newest_version, write_version

InitFunc = Callable[[tuple[int, int], torch.dtype], Tensor]


class HasRowState(Protocol):
    """An optimizer that keeps tensors with a row for each row of an embedding, such as those of `sparse_optimizers`."""

    state: Any
    row_state: ClassVar[tuple[str, ...]]

    def state_of(self, weight: Tensor) -> dict[str, Any]:
        """The state of an embedding's rows, which is made if there is none yet."""
        ...


class _Lookup(NamedTuple):
    """Rows that were fetched: global IDs of their nodes, (K,), and the leaf of autograd, (K, D)."""

    ids: Tensor
    rows: Tensor

    @property
    def gradient(self) -> Tensor:
        assert self.rows.grad is not None  # remembered by the hook that follows its accumulation
        return self.rows.grad.cpu()


class DistEmbedding(nn.Module):
    """A learnable row for every node of a type, divided among the workers as the nodes are.

    Made by all workers together. The rows are not among `parameters()` nor in `state_dict()`: see `save` and `load`.

    Args:
        graph: the whole graph.
        embedding_dim: D, width of a row.
        ntype: node type; may be left out where there is one.
        init_func: makes this worker's rows, (N_i, D), from that shape and the dtype. While it runs, torch's default
            generator has another state on every worker. Default: standard normal, as `torch.nn.Embedding`.
        dtype: of the rows; default torch's default dtype.

    Raises:
        GraphError: for message flow graphs, or where the type is not named among several.
        ConfigError: for a dimension below 1.
        FieldError: for an unknown type.

    Attributes:
        weight: this worker's rows, (N_i, D); a leaf of autograd.
        node_ids: the global IDs of their nodes, (N_i,) int64, ascending.
        original_ids: names under which rows are saved, (N_i,) int64: the data's `orig_id`, or what else outlasts the
            partitioning. None for global IDs.
    """

    def __init__(
        self,
        graph: GraphShardManager,
        embedding_dim: int,
        ntype: str | None = None,
        init_func: InitFunc | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = session.current_group()
        with group.guard():
            if not isinstance(embedding_dim, int) or embedding_dim < 1:
                raise ConfigError(f"embedding_dim is {embedding_dim!r}; expected an integer of at least 1.")
            self._owners = RowOwners(graph, ntype)
            self.node_ids = self._owners.node_ids
            self.num_embeddings = graph.num_nodes_global(ntype)
            self.embedding_dim = embedding_dim
            rows = _initial_rows(init_func, (len(self.node_ids), embedding_dim), dtype, group.rank)
            self._what = f"{self.num_embeddings} {ntype or 'nodes'}"
            self.original_ids = graph.original_ids(ntype)
            self._partitioning = graph._structure.signature
            self._call = f"DistEmbedding of {self._what}, width {embedding_dim}, {rows.dtype}"
            group.agree(f"making a {self._call}")
        self.weight = rows.to(graph.device).requires_grad_()
        self._lookups: dict[int, _Lookup] = {}  # that a backward has reached, by id of the rows

    @uncompiled
    def forward(self, node_ids: Tensor | None = None) -> Tensor:
        """This worker's rows or, in a call that all workers make together, the rows of any nodes.

        Args:
            node_ids: global IDs, (K,) int64, also of other workers' nodes, also repeated; may be empty. None for this
                worker's nodes: then every one of its rows counts as used.

        Returns:
            (N_i, D), `weight` itself; or (K, D).

        Raises:
            GraphError: for IDs that are not of nodes of this type.
        """
        if node_ids is None:
            return self.weight
        group = session.current_group()
        with group.guard():
            group.agree(f"lookup in a {self._call}")
            wanted, place = self._owners.checked(node_ids).unique(return_inverse=True)
            asked = exchange_tensors(self._owners.split(wanted, wanted))
            own = self.weight.detach()
            rows = torch.cat(exchange_tensors([own[self._owners.rows(ids)] for ids in asked])).to(own.device)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            rows = rows.to(accumulation_dtype(rows.dtype))  # in which gradients of repeated rows add up
            rows.requires_grad_().register_post_accumulate_grad_hook(partial(self._remember, wanted))
        return rows[place].to(self.weight.dtype)

    @torch.no_grad()
    def sum_gradients(self) -> tuple[Tensor, Tensor] | None:
        """The gradients of this worker's rows from all workers' backwards since the last `forget_gradients`.

        A collective call, which the optimizers make.

        Returns:
            Which rows were used, (U,) int64 ascending, and their gradients, (U, D); None where no worker used any.
        """
        group = session.current_group()
        with group.guard():
            flags = group.agree(
                f"gradients of a {self._call}", (self.weight.grad is not None) | bool(self._lookups) << 1
            )
            if not any(flags):
                return None
            if self.weight.grad is not None and self.weight.grad.is_sparse:  # summed before, with others'
                used = [self.weight.grad.indices()[0]]
                grads = [self.weight.grad.values()]
            elif self.weight.grad is not None:
                used = [torch.arange(len(self.weight), device=self.weight.device)]
                grads = [self.weight.grad]
            else:
                used = [self.node_ids[:0]]
                grads = [self.weight.detach()[:0]]
            if any(flag & 2 for flag in flags):
                ids = [self.node_ids[:0].cpu(), *(lookup.ids for lookup in self._lookups.values())]
                values = [self.weight.detach()[:0].cpu(), *(lookup.gradient for lookup in self._lookups.values())]
                fetched, sums = _summed(torch.cat(ids), torch.cat(values))
                used += [
                    self._owners.rows(theirs).to(self.weight.device)
                    for theirs in exchange_tensors(self._owners.split(fetched, fetched))
                ]
                grads += [
                    theirs.to(self.weight.device) for theirs in exchange_tensors(self._owners.split(fetched, sums))
                ]
        rows, total = (used[0], grads[0]) if len(used) == 1 else _summed(torch.cat(used), torch.cat(grads))
        return rows, total.to(self.weight.dtype)

    def forget_gradients(self) -> None:
        """Set gradients to None, as `zero_grad` of the optimizers does."""
        self.weight.grad = None
        for lookup in self._lookups.values():
            lookup.rows.grad = None  # a graph that was retained reaches them again
        self._lookups.clear()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        node_ids: Tensor | None = None,
        optimizer: HasRowState | None = None,
    ) -> None:
        """Write all rows, as `save_checkpoint` does; called by all workers together.

        Rows that were saved to the folder before are removed once the new ones are there.

        Args:
            folder: seen by all workers; it is made if need be.
            node_ids: names of this worker's rows that outlast the partitioning, (N_i,) int64. Default: original IDs
                where the data has them (`orig_id`), else global IDs, which serve this partitioning only.
            optimizer: its state of these rows is written, too.

        Raises:
            CheckpointError: where the files cannot be written; what was there before still is.
        """
        with session.current_group().guard():
            optimizers = [] if optimizer is None else [optimizer]
            rows = {"0": self.rows(optimizers, node_ids).packed()}
        write_version(folder, 0, {"rows": rows}, None, keep=1)

    @torch.no_grad()
    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        node_ids: Tensor | None = None,
        optimizer: HasRowState | None = None,
    ) -> None:
        """Read rows that `save` wrote, on any number of workers; called by all workers together.

        Args:
            folder: seen by all workers.
            node_ids: this worker's rows under the names given to `save`, if any were.
            optimizer: takes the state that was saved with the rows.

        Raises:
            CheckpointError: where files are missing or damaged, of another width, or lack rows.
        """
        optimizers = [] if optimizer is None else [optimizer]
        with session.current_group().guard():
            version = newest_version(folder)
            if version is None:
                raise CheckpointError(f"{folder} has no rows; expected the folder given to `save`.")
            rows = self.rows(optimizers, node_ids, empty=True)
            find_rows(version, "0", rows)
            session.current_group().agree(f"loading rows of a {self._call}")
            self.take_rows(rows, optimizers)

    def rows(self, optimizers: Sequence[HasRowState], node_ids: Tensor | None = None, *, empty: bool = False) -> Rows:
        """What there is to save of this worker's rows, optimizers' state included, or `empty` memory to load it."""
        names = f"IDs in the input graph of {self._what}"
        if node_ids is None:
            node_ids = self.original_ids
        if node_ids is None:
            node_ids, names = self.node_ids, f"global IDs of {self._what} in the partitioning {self._partitioning}"
        columns: dict[str, Tensor] = {"weight": self.weight.detach()}
        scalars: dict[str, Any] = {}
        for number, optimizer in enumerate(optimizers):
            for name, value in optimizer.state_of(self.weight).items():
                (columns if name in optimizer.row_state else scalars)[f"{number}.{name}"] = value
        if empty:
            columns = {name: torch.empty_like(column, device="cpu") for name, column in columns.items()}
        return Rows(names, node_ids, columns, scalars)

    @torch.no_grad()
    def take_rows(self, rows: Rows, optimizers: Sequence[HasRowState]) -> None:
        """Set rows and state from what `rows` returned, once it is filled in."""
        self.weight.copy_(rows.columns["weight"])
        for number, optimizer in enumerate(optimizers):
            state = optimizer.state_of(self.weight)
            for name in state:
                key = f"{number}.{name}"
                state[name] = rows.columns[key].to(self.weight) if key in rows.columns else rows.scalars[key]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {len(self.weight)} on this worker"

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "DistEmbedding":
        """Move the rows along with the parameters of a model, in `to`, `double` and so on."""
        super()._apply(fn, *args, **kwargs)
        self.weight.data = fn(self.weight.data)
        self.node_ids = fn(self.node_ids)
        return self

    def _remember(self, ids: Tensor, rows: Tensor) -> None:
        self._lookups[id(rows)] = _Lookup(ids, rows)


def _initial_rows(init_func: InitFunc | None, shape: tuple[int, int], dtype: torch.dtype | None, rank: int) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    seed = (int(torch.randint(2**62, ())) + rank * SEED_STEP) % 2**64
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        rows = torch.randn(shape, dtype=dtype) if init_func is None else init_func(shape, dtype).detach()
    if rows.shape != shape:
        raise GraphError(f"init_func made rows of {tuple(rows.shape)}; expected {shape}.")
    return rows


def _summed(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct IDs, ascending, and for each the sum of its values, (K, D), in float32 at least."""
    distinct, place = ids.unique(return_inverse=True)
    values = values.to(accumulation_dtype(values.dtype))
    return distinct, values.new_zeros(len(distinct), *values.shape[1:]).index_add_(0, place, values)
