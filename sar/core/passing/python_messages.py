"""Python message functions: run tile by tile, and again in the backward.

[Note: replay]
Each tile's call of the message function runs under `torch.utils.checkpoint` (non-reentrant), so that nothing that it
computes outlives the tile, and autograd finds every parameter and every captured tensor by itself. What surrounds the
tiles is a frame of autograd functions. In the order of the backward:

- `_End`, on the results: agrees with the other workers on the backward and posts the first tile. It has saved the
  fields, after all communication of the forward. So where the user checkpoints a layer, torch runs the forward again
  before this backward posts anything, and does not leave it early in the middle of the exchange.
- `_Combine`, one for each tile: hands its messages their gradient. Tiles are combined in place, and nothing is saved.
- The tile's replay, set off by the first saved tensor that autograd asks for. Its first operation is `_Fetch`, which
  takes the tile's rows from the sweep again; when gradients have come back to `_Fetch`, they go home.
- `_Begin`, on the source fields: takes in what is still on its way home.

Autograd runs what was made last first, so all workers go through the tiles in the reverse order of the forward, which
is the order of the backward's sweep. All tensors that a tile reads are handed in when the call is made: a frame that
changes later does not change the replay.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import update_wrapper
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from sar.comm.buffers import BufferPool
from sar.comm.exchange import Exchange, Portion, Settings
from sar.comm.group import Group
from sar.comm.plan import Tile
from sar.comm.rows import RowFormat
from sar.core.empty import views_of_nothing
from sar.core.passing.batches import EdgeBatch, Fields, RowView
from sar.core.passing.gather import Combine, gather_rows
from sar.core.passing.mailbox import checked_results
from sar.core.relation import Relation
from sar.errors import FieldError, GraphError
from sar.kernels import EdgeBlock, Target, add_rows

MessageFunction = Callable[[EdgeBatch], Mapping[str, Tensor]]


class _Recording(NamedTuple):
    """The fields that a message function reads, and what it made when it was called on no edges, (0, ...) each."""

    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]
    made: dict[str, Tensor]

    def read(self) -> list[Tensor]:
        """All fields read."""
        return [*self.src.values(), *self.dst.values(), *self.edge.values()]


class _Recorded(dict[str, Tensor]):
    """Fields that the recording found; another one is an error, because no worker has made room for it."""

    def __missing__(self, key: str) -> Tensor:
        raise FieldError(
            f"The message function reads {key!r} on some edges only; let it read the same fields whenever it is called."
        )


class PythonCall:
    """One `update_all` or `apply_edges` with a Python message function.

    Args:
        engine, pool, relation, settings: as in a built-in call.
        function: takes an `EdgeBatch`, returns messages, (E_batch, ...) each.
        reducer: sum, mean, max or min of the message `reduced`; None to return the messages of all edges.
        find_edges: global IDs of sources and destinations, and edge IDs, of the edges of a block.
    """

    def __init__(
        self,
        group: Group,
        pool: BufferPool,
        relation: Relation,
        settings: Settings,
        function: MessageFunction,
        reducer: str | None,
        reduced: str | None,
        find_edges: Callable[[EdgeBlock, Tile | None], tuple[Tensor, Tensor, Tensor]],
    ) -> None:
        self.group = group
        self.pool = pool
        self.relation = relation
        self.settings = settings
        self.function = with_fixed_closure(function)
        self.reducer = reducer
        self.reduced = reduced
        self.find_edges = find_edges
        self.words = ""
        self._src: list[Tensor] = []  # source fields, as they were at the call, while an exchange is under way
        self._sweep: Iterator[Portion] | None = None  # of the backward under way
        self._portion: Portion | None = None  # the tile at hand
        self._home: list[Tensor] = []  # gradients of the source fields

    def run(self, src: Fields, dst: Fields, edge: Fields, describe: Callable[[str], str]) -> dict[str, Tensor]:
        """Call the function on all edges and combine what it makes.

        Args:
            src, dst, edge: frames of sources, destinations and edges.
            describe: adds graph and settings to the words of the agreement.

        Returns:
            (N_dst, ...) for the reduced field, or (E, ...) for each field that the function makes.
        """
        recording = self._record(src, dst, edge)
        made = recording.made
        if self.reduced is not None:
            if self.reduced not in made:
                raise GraphError(f"{self._name} makes {list(made)}, but the reducer reads {self.reduced!r}.")
            made = {self.reduced: made[self.reduced]}
        distributed = bool(recording.src) and self.group.world_size > 1
        flags = int(any(m.requires_grad for m in made.values()))
        self.words = describe(
            f"{self.reducer or 'apply_edges'} of {self._name}, which reads {_described(recording.src)} of the sources "
            f"and makes {_described(made)}"
        )
        if distributed:
            for theirs in self.group.agree(self.words, flags):
                flags |= theirs
        with torch.set_grad_enabled(bool(flags)):
            return self._combine(recording, made, distributed)

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def _record(self, src: Fields, dst: Fields, edge: Fields) -> _Recording:
        """Find out what the function reads and makes, on no edges where it can do without."""
        reads: tuple[set[str], set[str], set[str]] = (set(), set(), set())

        def call(rows: int) -> Mapping[str, Tensor]:
            def take(column: Tensor) -> Tensor:
                return column[:rows] if len(column) >= rows else column.new_zeros(rows, *column.shape[1:])

            ids = torch.zeros(rows, dtype=torch.int64, device=self.relation.in_degrees.device)
            u, v, e = RowView(src, take, reads[0]), RowView(dst, take, reads[1]), RowView(edge, take, reads[2])
            batch = EdgeBatch(u, v, e, self.relation.etype, rows, lambda: (ids, ids, ids))
            return checked_results(self.function, self.function(batch), rows)

        with torch.random.fork_rng():
            try:
                made = call(0)
            except Exception:  # not every function takes an empty batch: show it an edge
                made = {name: m[:0] for name, m in call(1).items()}
        src, dst, edge = (
            {k: fields[k] for k in sorted(read)} for fields, read in zip((src, dst, edge), reads, strict=True)
        )
        return _Recording(src, dst, edge, dict(made))

    # -- forward

    def _combine(self, recording: _Recording, made: dict[str, Tensor], distributed: bool) -> dict[str, Tensor]:
        relation, rank = self.relation, self.group.rank
        gradients = torch.is_grad_enabled()
        names, src = list(made), list(recording.src.values())
        device = relation.in_degrees.device
        token = torch.empty(0)
        self._src = [t.detach() for t in src]
        if distributed:
            token, *own_src = _Begin.apply(torch.empty(0, requires_grad=gradients), self, *src)
        else:
            own_src = src
        combines = [Combine(relation, self.reducer, m) for m in made.values()]
        totals = [combine.start(device) for combine in combines]
        shards = {k: v.split([b.num_edges for b in relation.blocks]) for k, v in recording.edge.items()}

        def add(block: EdgeBlock, shard: int, tile: Tile | None) -> None:
            tensors = [*(own_src if tile is None else ()), *recording.dst.values()]
            pieces = [pieces[shard] for pieces in shards.values()]
            offset = sum(b.num_edges for b in relation.blocks[:shard])
            arguments = (recording, names, block, offset, tile, token, *tensors, *pieces)
            if gradients and not (self.settings.keep and distributed):
                # Early stopping leaves by an exception, which would look like a failure on its way through `guard`.
                with set_checkpoint_early_stop(False):
                    messages = checkpoint(self._messages, *arguments, use_reentrant=False)
            else:
                messages = self._messages(*arguments)
            for i, (combine, message) in enumerate(zip(combines, messages, strict=True)):
                totals[i] = combine.add(totals[i], message, block)

        if distributed:
            portions = self._exchange().sweep(device, self._src, keep=self.settings.keep and gradients)
            add(relation.blocks[rank], rank, None)
            for self._portion in portions:
                tile = self._portion.tile
                add(relation.tile(tile), tile.peer, tile)
            totals = list(_End.apply(self, recording, *totals)) if gradients else totals
        else:
            for p, block in enumerate(relation.blocks):
                add(block, p, None)
        self._portion, self._src = None, []
        return {name: combine.finish(total) for name, combine, total in zip(names, combines, totals, strict=True)}

    def _messages(
        self,
        recording: _Recording,
        names: list[str],
        block: EdgeBlock,
        offset: int,
        tile: Tile | None,
        token: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """What the function makes on the edges of a block; the fetch comes first: see [Note: replay]."""
        given = iter(tensors)
        if tile is None:
            src = _Recorded((k, next(given)) for k in recording.src)
        else:
            token, *rows = _Fetch.apply(token, self, tile)
            src = _Recorded(zip(recording.src, rows, strict=True))
        dst = _Recorded((k, next(given)) for k in recording.dst)
        edge = _Recorded((k, next(given)) for k in recording.edge)
        ids = None if block.edge_ids is None else block.edge_ids.long() - offset
        batch = EdgeBatch(
            RowView(src, lambda c: gather_rows(c, block, Target.U)),
            RowView(dst, lambda c: gather_rows(c, block, Target.V)),
            RowView(edge, lambda c: c if ids is None else c.index_select(0, ids)),
            self.relation.etype,
            block.num_edges,
            lambda: self.find_edges(block, tile),
        )
        with self.group.guard(), views_of_nothing(block.num_edges):
            made = checked_results(self.function, self.function(batch), block.num_edges)
            for name in names:
                if name not in made:
                    raise GraphError(
                        f"{self._name} makes {name!r} on some edges only; let it always make the same fields."
                    )
        return tuple(_Tie.apply(made[name], token) if made[name].is_floating_point() else made[name] for name in names)

    def _exchange(self) -> Exchange:
        widest = RowFormat.of(self._src)
        return Exchange(self.group, self.relation.plan, self.settings, widest, self.pool, self.words)

    # -- backward, driven by autograd

    def rows(self, tile: Tile) -> list[Tensor]:
        """The tile's source rows, from the forward's sweep or the backward's."""
        portion = self._portion if self._sweep is None else self._advance(tile)
        assert portion is not None
        assert portion.rows is not None
        return portion.rows

    def start_backward(self, end: Any) -> None:
        """Agree on the backward and post its first tile."""
        with self.group.guard():
            self._src = list(end.saved_tensors[: end.num_src])  # raises where a field has been changed in place
            self.group.agree(f"backward of {self.words}")
            differentiable = [t for t in self._src if t.is_floating_point()]
            self._home = [torch.zeros_like(t) for t in differentiable]
            self._portion = None
            self._sweep = self._exchange().sweep(
                self.relation.in_degrees.device,
                None if self.settings.keep else self._src,
                grads=RowFormat.of(differentiable) if differentiable else None,
                deliver=self._deliver,
                reverse=True,
            )

    def return_grads(self, tile: Tile, grads: list[Tensor]) -> None:
        """Send the gradients of a tile's rows home."""
        with self.group.guard():
            portion = self._advance(tile)
            for buffer, grad in zip(portion.grads or [], grads, strict=True):
                buffer.copy_(grad)

    def finish_backward(self, own: list[Tensor]) -> list[Tensor]:
        """Take in the last gradients and add them to this worker's own."""
        with self.group.guard():
            assert self._sweep is not None
            for _ in self._sweep:
                raise AssertionError("a tile was left out of the backward")
            self._sweep, self._src = None, []
            return [home.add_(grad) for home, grad in zip(self._home, own, strict=True)]

    def _advance(self, tile: Tile) -> Portion:
        assert self._sweep is not None
        if self._portion is None or self._portion.tile != tile:
            self._portion = next(self._sweep)
            assert self._portion.tile == tile, "autograd left the order of the tiles"
        return self._portion

    def _deliver(self, rows: Tensor, incoming: list[Tensor]) -> None:
        for home, grad in zip(self._home, incoming, strict=True):
            add_rows(rows, grad, home)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: PythonCall, *src: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.differentiable = [t.is_floating_point() for t in src]
        ctx.mark_non_differentiable(*[t for t in src if not t.is_floating_point()])
        return (torch.empty(0), *[t.view_as(t) for t in src])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = [grad for grad, use in zip(grads, ctx.differentiable, strict=True) if use]
        total = iter(ctx.call.finish_backward(own))
        return (None, None, *[next(total) if use else None for use in ctx.differentiable])


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, call: PythonCall, tile: Tile) -> tuple[Tensor, ...]:
        ctx.call, ctx.tile = call, tile
        rows = call.rows(tile)
        ctx.differentiable = [t.is_floating_point() for t in rows]
        ctx.mark_non_differentiable(*[t for t in rows if not t.is_floating_point()])
        return (torch.empty(0), *rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.call.return_grads(ctx.tile, [g for g, use in zip(grads, ctx.differentiable, strict=True) if use])
        return torch.zeros(0), None, None


class _Tie(torch.autograd.Function):
    """Makes the backward of a message reach its fetch, whatever the message was made of."""

    @staticmethod
    def forward(ctx: Any, message: Tensor, token: Tensor) -> Tensor:
        return message.view_as(message)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros(0)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PythonCall, recording: _Recording, *totals: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.num_src = call, len(recording.src)
        ctx.save_for_backward(*[t.detach() for t in recording.read()])
        return tuple(t.view_as(t) for t in totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.start_backward(ctx)
        return (None, None, *grads)


def with_fixed_closure(function: MessageFunction) -> MessageFunction:
    """A copy of the function that keeps the values which the variables around it have now.

    A replay comes later, when the variable of a loop around a lambda has moved on.
    """
    if not isinstance(function, FunctionType) or not function.__closure__:
        return function
    try:
        cells = tuple(CellType(cell.cell_contents) for cell in function.__closure__)
    except ValueError:  # a variable that is not bound yet
        return function
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    return update_wrapper(copy, function)


def _described(fields: dict[str, Tensor]) -> str:
    return ", ".join(f"{k} {v.dtype} {tuple(v.shape[1:])}" for k, v in fields.items()) or "nothing"
