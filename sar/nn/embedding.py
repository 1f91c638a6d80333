"""Learnable embeddings of nodes, each row on the worker that owns its node, and their optimizers.

[Note: lookups and gradients]
The rows are not parameters of the model, because each worker has different ones: `sync_params`, `gather_grads` and
`DistributedDataParallel`, which work on parameters, would mix them up. `SparseAdam` and `SparseAdagrad` update them.

`emb()` returns this worker's rows themselves, and a distributed graph completes their gradient. `emb(node_ids)` fetches
the rows of any nodes, each once: one message with IDs to every owner, and one with rows back. The fetched rows are a
leaf of autograd, so the backward does not communicate, and a worker with an empty batch may skip it. We keep the leaves
that a backward has reached. The optimizer's step sums their gradients on the rows' owners, and so knows which rows were
used.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sar.comm import session
from sar.core.collective import uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.attention import SEED_STEP
from sar.data.versions import Rows
from sar.errors import ConfigError, GraphError
from sar.kernels import accumulation_dtype
from sar.nn.rows import RowOwners, added_up, send
from sar.tensors.views import to_device

InitFunc = Callable[[tuple[int, int], torch.dtype], Tensor]
State = dict[str, Any]


class DistEmbedding(nn.Module):
    """A learnable embedding with a row for every node of a type. Each worker has the rows of its own nodes.

    The constructor is a collective call. The rows are neither in `parameters()` nor in `state_dict()`;
    `sar.save_checkpoint` saves them.

    Args:
        graph: the whole graph.
        embedding_dim: D, width of a row.
        ntype: node type; optional if there is only one.
        init_func: called as `init_func((N_i, D), dtype)`; returns this worker's initial rows. torch's default generator
            is seeded differently on every worker during the call. Default: standard normal, as in `torch.nn.Embedding`.
        dtype: dtype of the rows. Default: torch's default dtype.

    Raises:
        GraphError: for message flow graphs, or if there are several types and `ntype` is None.
        ConfigError: for a dimension below 1.
        FieldError: for an unknown type.

    Attributes:
        weight: this worker's rows, (N_i, D); a leaf of autograd.
        node_ids: global IDs of their nodes, (N_i,) int64, ascending.
        original_ids: IDs under which rows are saved, (N_i,) int64: the data's `orig_id`, or any IDs that do not depend
            on the partitioning. None uses global IDs.
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
        with session.current_group().guard() as group:
            if not isinstance(embedding_dim, int) or embedding_dim < 1:
                raise ConfigError(f"embedding_dim is {embedding_dim!r}; expected an integer of at least 1.")
            self._owners = RowOwners(graph, ntype)
            self.num_embeddings = graph.num_nodes_global(ntype)
            self.embedding_dim = embedding_dim
            shape, dtype = (len(self._owners.node_ids), embedding_dim), dtype or torch.get_default_dtype()
            seed = (int(torch.randint(2**62, (), device="cpu")) + group.rank * SEED_STEP) % 2**64
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed)
                rows = init_func(shape, dtype) if init_func else torch.randn(shape, dtype=dtype, device="cpu")
            if rows.shape != shape:
                raise GraphError(f"init_func made rows of {tuple(rows.shape)}; expected {shape}.")
            self._what = f"{self.num_embeddings} {ntype or 'nodes'}"
            self.original_ids = graph.original_ids(ntype)
            self._partitioning = graph._structure.signature
            self._call = f"DistEmbedding of {self._what}, width {embedding_dim}, {rows.dtype}"
            group.agree(f"making a {self._call}")
        self.weight = rows.detach().to(graph.device).requires_grad_()
        # Lookups that a backward has reached, by `id` of the rows: their global IDs, (K,), and the rows, (K, D).
        self._lookups: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def node_ids(self) -> Tensor:
        return self._owners.node_ids.clone()

    @uncompiled
    def forward(self, node_ids: Tensor | None = None) -> Tensor:
        """Look up rows of any nodes, which is a collective call, or return all rows of this worker.

        Args:
            node_ids: global IDs of nodes on any worker, (K,) int64. IDs may repeat; K may be 0. None (default) returns
                the rows of this worker's nodes, and counts all of them as used.

        Returns:
            The rows of `node_ids`, (K, D), or `weight` itself, (N_i, D).

        Raises:
            GraphError: if some IDs are not nodes of this type.
        """
        if node_ids is None:
            return self.weight
        with session.current_group().guard() as group:
            group.agree(f"lookup in a {self._call}")
            wanted, place = self._owners.checked(node_ids).unique(return_inverse=True)
            rows, _ = self._owners.fetch(self.weight.detach(), wanted)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            rows = rows.to(accumulation_dtype(rows.dtype))  # because gradients of repeated rows add up
            lookups = self._lookups
            rows.requires_grad_().register_post_accumulate_grad_hook(lambda r: lookups.update({id(r): (wanted, r)}))
        return rows[to_device(place, rows.device)].to(self.weight.dtype)

    @torch.no_grad()
    def sum_gradients(self) -> tuple[Tensor, Tensor] | None:
        """Sum the gradients of this worker's rows over all workers and all backwards since `forget_gradients`.

        Returns the indices of used rows, (U,) int64 ascending, and their gradients, (U, D), or None if no worker used
        any row. A collective call, which the optimizers make.
        """
        with session.current_group().guard() as group:
            flags = group.agree(
                f"gradients of a {self._call}", (self.weight.grad is not None) | bool(self._lookups) << 1
            )
            if not any(flags):
                return None
            grad, device = self.weight.grad, self.weight.device
            if grad is None:
                used, grads = [self._owners.node_ids[:0]], [self.weight.detach()[:0]]
            else:
                used, grads = [torch.arange(len(grad), device=device)], [grad]
            if any(flag & 2 for flag in flags):
                lookups = self._lookups.values()
                ids = [torch.empty(0, dtype=torch.int64, device="cpu"), *(ids for ids, _ in lookups)]
                values = [self.weight.detach()[:0], *(rows.grad for _, rows in lookups if rows.grad is not None)]
                fetched, sums = _summed(torch.cat(ids), torch.cat(values))
                used.append(self._owners.rows(torch.cat(send(fetched, fetched, self._owners.ends))).to(device))
                grads += [to_device(arrived, device) for arrived in send(fetched, sums, self._owners.ends)]
        rows, total = (used[0], grads[0]) if len(used) == 1 else _summed(torch.cat(used), torch.cat(grads))
        return rows, total.to(self.weight.dtype)

    def forget_gradients(self) -> None:
        """Set gradients to None. The optimizers' `zero_grad` calls this."""
        self.weight.grad = None
        for _, rows in self._lookups.values():
            rows.grad = None  # because a graph that was retained may reach them again
        self._lookups.clear()

    def rows(self, optimizers: Sequence["SparseOptimizer"], *, empty: bool = False) -> Rows:
        """Return this worker's rows and optimizer state for saving; with `empty`, uninitialised memory for loading."""
        node_ids, names = self.original_ids, f"IDs in the input graph of {self._what}"
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
    def take_rows(self, rows: Rows, optimizers: Sequence["SparseOptimizer"]) -> None:
        """Copy loaded rows and optimizer state from the result of `rows`."""
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
        self._owners.node_ids = fn(self._owners.node_ids)
        return self


def _summed(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct IDs, ascending, and the sum of the values, (K, D), of each, in float32 at least."""
    distinct, place = ids.unique(return_inverse=True)
    return distinct, added_up(values, place, len(distinct))


class SparseOptimizer(torch.optim.Optimizer):
    """Base class of `SparseAdam` and `SparseAdagrad`. `step` is a collective call.

    Gradients are summed over workers, as by `gather_grads`, so divide the loss by the global count. A row counts as
    used if `emb(node_ids)` on any worker has looked it up and a backward has reached it; `emb()` uses all rows.
    Embeddings that no worker used do not change and count no step. Learning rate schedulers work as in torch. Pass the
    same embeddings in the same order on all workers. `defaults` are settings by name.
    """

    row_state: ClassVar[tuple[str, ...]]  # names of the state's tensors that have a row for every node, (N_i, D) each

    def __init__(self, embeddings: Iterable[DistEmbedding], defaults: dict[str, Any]) -> None:
        self.embeddings = list(embeddings)
        if not all(isinstance(emb, DistEmbedding) for emb in self.embeddings):
            raise ConfigError(
                f"{type(self).__name__} got {[type(emb).__name__ for emb in self.embeddings]}; expected a list of "
                "DistEmbedding. Other parameters belong in an optimizer of torch."
            )
        for name, value in defaults.items():
            if name == "betas" and not all(0 <= beta < 1 for beta in value):
                raise ConfigError(f"betas is {value}; expected two numbers from 0 to below 1.")
            if name != "betas" and not value >= 0:
                raise ConfigError(f"{name} is {value}; expected a number of at least 0.")
        super().__init__([emb.weight for emb in self.embeddings], defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, and count no rows as used. This is not a collective call."""
        for emb in self.embeddings:
            emb.forget_gradients()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `GradScaler.step`, which would look for overflows of this worker's gradients only."""
        raise ConfigError(
            f"{type(self).__name__} is stepped by a GradScaler; expected gradients of a loss that is not scaled. Train "
            "in bfloat16, which needs no scaler."
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum the gradients over workers and update the rows that were used; a collective call.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss that `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        [group] = self.param_groups
        for emb in self.embeddings:
            summed = emb.sum_gradients()
            if summed is not None:
                state = self.state_of(emb.weight)
                state["step"] += 1
                self._update(emb.weight, *summed, state, group)
        return loss

    def state_of(self, weight: Tensor) -> State:
        """The state of an embedding's rows, created on first use."""
        [group] = self.param_groups
        state: State = self.state[weight]
        if not state:
            first = group.get("initial_accumulator_value", 0.0)
            rows = {name: torch.full_like(weight, first, requires_grad=False) for name in self.row_state}
            state |= {"step": 0} | rows
        return state

    @abstractmethod
    def _update(self, weight: Tensor, rows: Tensor, grads: Tensor, state: State, group: dict[str, Any]) -> None:
        """Update `rows`, (U,), of the weight, (N_i, D), and of the state with their gradients, (U, D)."""
