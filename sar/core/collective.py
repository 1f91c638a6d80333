"""Operations that all workers compute together, as nodes of autograd: all workers run the same forwards and backwards.

[Note: one worker's gradient is everybody's]
A backward that communicates must run on all workers or on none. So the workers agree in the forward on the inputs that
need a gradient, the OR over all workers. The autograd node exists on every worker: its input includes an empty tensor,
the anchor, that requires a gradient. If no worker needs a gradient, the results are marked non-differentiable. The
backward begins with a separate agreement, which names the forward by its number, so gradients of two equal calls
cannot be mixed up.

[Note: saved tensors]
Tensors for the backward are saved through autograd, so that checkpointing and offloading work. The backward unpacks
them first, before it communicates, because then torch notices fields that were changed in place, and runs a
checkpointed forward again. Unless the graph is retained, the list of saved tensors is then their only owner, so a
backward frees a tensor by removing it from the list.

[Note: second derivatives]
There are none, and asking for one raises. torch's `once_differentiable` is not enough: if the loss is linear in a
result, or if autograd is asked for the gradients of some inputs only, it silently leaves out this call's part. So a
gradient that may be differentiated again depends on all inputs of the call through a node whose backward raises.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from sar.comm.exchange import Exchange
from sar.comm.gradients import refuse_average
from sar.comm.group import Group, Guard, is_transforming, refuse_transforms
from sar.comm.rows import FieldFormat, RowFormat
from sar.comm.statistics import BACKWARD
from sar.comm.tiles import OWN_ROWS, GradientReturn, HaloSlice, Layout, LocalFields, Settings, Tile
from sar.core.relation import Relation, Structure
from sar.errors import GraphError
from sar.host.ranges import named, traced
from sar.kernels import EdgeBlock, accumulation_dtype

AnOperation = TypeVar("AnOperation", bound="Operation")
Function = TypeVar("Function", bound=Callable[..., Any])

OPERATIONS: Final = 32
"""Number of operations that a relation caches."""


def uncompiled(function: Function) -> Function:
    """Decorator that excludes a function, and all functions it calls, from `torch.compile`.

    `torch.compiler.disable` does the same, but imports torch's compiler. We import it only if the program has done so.
    """
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]


class CallContext(NamedTuple):
    """The graph, relation and settings of a call, for its forward and its backward."""

    structure: Structure
    relation: Relation
    settings: Settings

    def operation(self, key: tuple[Any, ...], make: Callable[[], AnOperation]) -> AnOperation:
        """The operation that equal calls share, which have the same `key`; the relation caches it."""
        operations = self.relation.operations
        key = (*key, self.settings, self.structure.signature, torch.is_grad_enabled())
        operation: AnOperation | None = operations.get(key)
        if operation is None:
            operation = operations[key] = make()
            if len(operations) > OPERATIONS:
                del operations[next(iter(operations))]
        return operation

    def signature(self, call: str) -> str:
        """The text by which workers compare a call: its operation, relation, graph and settings."""
        return (
            f"{call}; along {self.relation.etype}, gradients {'on' if torch.is_grad_enabled() else 'off'}, "
            f"graph {self.structure.signature}, {self.settings}"
        )


@dataclass(eq=False)
class Operation:
    """What equal calls along a relation share. It has no reference to the relation, so that unused graphs are freed."""

    signature: str  # see `CallContext.signature`
    widest: RowFormat | None  # widest rows that travel in either direction; None if nothing travels
    layouts: dict[bool, Layout] = field(init=False, default_factory=dict)  # by `TileCall.both_ways`, on first use


class ForwardOutput(NamedTuple):
    """Results of a forward, for the caller, and tensors to save for the backward."""

    results: tuple[Tensor, ...]
    saved: Sequence[Tensor | None] = ()
    constants: tuple[Tensor, ...] = ()  # results that are never differentiable


def widest_rows(fields: Iterable[Tensor]) -> RowFormat:
    """The format of the rows of fields, whose gradients travel in float32 at least."""
    return RowFormat(tuple(FieldFormat(accumulation_dtype(x.dtype), tuple(x.shape[1:])) for x in fields))


class Collective(ABC):
    """Base class of distributed operations. Subclasses define `forward` and `backward`; an instance is applied once."""

    def __init__(self, group: Group | None, signature: str, *, distributed: bool = True) -> None:
        self.group = group  # None for a local operation
        self.signature = signature  # text by which workers compare the call; see `CallContext.signature`
        self.distributed = distributed and group is not None and group.world_size > 1
        self.backward_communicates = self.distributed  # equal on all workers; the forward may set it
        # Sends errors that are raised inside to all workers.
        self.guard: Callable[[], AbstractContextManager[object]] = partial(Guard, group) if group else nullcontext
        self.needs: Sequence[bool] = ()  # whether each input needs a gradient on this worker
        self.all_flags: list[int] = []  # `flags` of every worker, by rank
        self.needed = 0  # OR of all workers' flags; by default bit i is set if input i needs a gradient
        self.dtypes: list[torch.dtype | None] = []  # dtypes of the inputs
        self.number = 0  # number of the forward; see `Group.call_id`
        # Rows of tiles that the forward keeps for the backward. In between autograd has them, and we their numbers.
        self.kept: dict[HaloSlice, list[Tensor]] = {}
        self.num_kept: dict[HaloSlice, int] = {}
        self.input_ties: list[Tensor] = []  # empty tensors that depend on the inputs: see [Note: second derivatives]

    @abstractmethod
    def forward(self, *inputs: Any) -> ForwardOutput:
        """Compute the results from inputs that are tensors or None. `needs` and `needed` are already set."""

    @abstractmethod
    def backward(self, saved: list[Any], *grads: Tensor) -> Sequence[Tensor | None]:
        """Compute the gradient of each input, None if this worker needs none, from the gradients of the results."""

    def flags(self) -> int:
        """This worker's bits for the agreement, up to 63. `needed` is their OR over all workers."""
        bits = 0
        for i, need in enumerate(self.needs):
            bits |= need << i
        return bits

    def apply(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the results, as one node of autograd."""
        if is_transforming():
            with self.guard():
                refuse_transforms(*inputs)  # torch would require rules that calls do not define
        grad, needs = torch.is_grad_enabled(), []
        for x in inputs:
            self.dtypes.append(None if x is None else x.dtype)
            needs.append(need := grad and x is not None and x.requires_grad)  # torch's own are true under `no_grad`
            if x is not None and need:
                self.input_ties.append((x[:0] if x.dim() else x).clone())
        self.needs = needs
        # Ties the node to autograd on all workers: see [Note: one worker's gradient is everybody's].
        anchor = torch.empty(0, requires_grad=grad and self.distributed, device="cpu")
        results: tuple[Tensor, ...] = Node.apply(anchor, self, *inputs)
        return results


class TileCall(Collective):
    """An operation along a relation, which goes through the relation's tiles in the forward and in the backward."""

    def __init__(self, context: CallContext, operation: Operation) -> None:
        super().__init__(context.structure.group, operation.signature, distributed=operation.widest is not None)
        self.context = context
        self.relation = context.relation
        self.operation = operation
        self.both_ways = True  # whether an exchange may fetch rows and return gradients; the forward may set it
        self.rereads = True  # whether the backward, if there is one, reads rows of the sources; the forward may set it
        self.letters: dict[int, Any] = {}  # of the forward for the backward: see `ExchangeSpec.letters`

    def tiles(
        self,
        fields: list[Tensor] | None = None,
        *,
        backward: bool = False,
        local: LocalFields | None = None,
        returns: GradientReturn | None = None,
        own_first: bool = False,
    ) -> Iterator[tuple[EdgeBlock, Tile]]:
        """Iterate over all edges of the relation: each block with the tile it reads, from `Exchange.tiles`.

        The first messages are posted at once. Edges that read this worker's rows come with `OWN_ROWS`, while these
        travel. In modes 2 and 3 the forward keeps the rows that the backward reads, which does not fetch them again.
        """
        (structure, relation, settings), operation = self.context, self.operation
        if not self.distributed or operation.widest is None:
            rank, counts = structure.group.rank, map(len, relation.halos)
            halos = [HaloSlice(part, rank, 0, count, count) for part, count in enumerate(counts)]
            tiles = (OWN_ROWS if halo.owner == rank else OWN_ROWS._replace(halo=halo) for halo in halos)
            return zip(relation.blocks, tiles, strict=True)
        layout = operation.layouts.get(self.both_ways)
        if layout is None:
            layout = Layout.of(relation.plan, settings, operation.widest, both_ways=self.both_ways)
            operation.layouts[self.both_ways] = layout
        rereads = self.rereads and self.needed != 0
        keep, letters = settings.disable_sr and rereads, self.letters
        if backward:  # letters are freed at the end of the exchange, even if the graph is retained
            self.letters = {}
        exchange = Exchange(
            *(structure.group, relation.plan, settings, layout, self.signature, structure.device),
            None if keep and backward else fields,
            keep=keep,
            local=local,
            returns=returns,
            own_first=own_first,
            letters=letters if rereads and not keep else None,
        )
        return self._with_blocks(exchange.tiles(), keep)

    def _with_blocks(self, received: Iterable[Tile], keep: bool) -> Iterator[tuple[EdgeBlock, Tile]]:
        for tile in received:
            halo = tile.halo
            if halo is None:
                block = self.relation.blocks[self.context.structure.group.rank]
            elif tile.sources is None:
                block = self.relation.tile(halo)
            else:
                block = self.relation.in_place(halo.owner, tile.sources)
            if keep and halo is not None:
                if tile.rows is None:
                    tile = tile._replace(rows=self.kept.pop(halo))
                else:
                    self.kept[halo] = tile.rows
            if traced():
                with named("own edges" if halo is None else f"tile {halo.begin}-{halo.end} of worker {halo.owner}"):
                    yield block, tile
            else:
                yield block, tile


class Node(torch.autograd.Function):
    """Autograd node of a call: see [Note: one worker's gradient is everybody's] and [Note: saved tensors]."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Collective, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        group, ctx.call = call.group, call
        with call.guard():
            call.all_flags = [call.flags()]
            if group is not None and call.distributed:
                call.all_flags = group.agree(call.signature, *call.all_flags)
            elif group is not None:
                group.follow(call.signature)
            for flags in call.all_flags:
                call.needed |= flags
            call.number = 0 if group is None else group.call_id
            results, saved, constants = call.forward(*inputs)
        if not call.needed:
            ctx.mark_non_differentiable(*results)
            return results
        ctx.save_for_backward(*saved, *chain.from_iterable(call.kept.values()))
        if call.kept:
            call.num_kept, call.kept = {halo: len(rows) for halo, rows in call.kept.items()}, {}
        for result in results:
            if not (result.is_floating_point() or result.is_complex()):
                constants = (*constants, result)
        ctx.mark_non_differentiable(*constants)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: Collective = ctx.call
        if call.distributed:
            refuse_average()
        with torch.no_grad(), call.guard():
            saved = list(ctx.saved_tensors)  # unpacked once, as checkpoints require
            ctx.maybe_clear_saved_tensors()
            if call.group is not None:
                begin = call.group.agree if call.backward_communicates else call.group.follow
                begin(f"{BACKWARD}{call.signature}; call {call.number}")
            for halo, count in reversed(call.num_kept.items()):
                saved, call.kept[halo] = saved[:-count], saved[-count:]
            input_grads = call.backward(saved, *grads)
        arguments: list[Tensor | None] = [None, None]  # gradients of the anchor, of the call, and of the inputs
        for grad, dtype, need in zip(input_grads, call.dtypes, call.needs, strict=True):
            arguments.append(grad.to(dtype) if need and grad is not None else None)
        return NotTwice.apply(arguments, *call.input_ties, *grads) if torch.is_grad_enabled() else tuple(arguments)


class NotTwice(torch.autograd.Function):
    """Identity of the first argument that depends on all others. Its backward raises, to forbid double backward."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *others: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise GraphError(
            "A distributed call would be differentiated twice, but sar has first derivatives only. Detach the first, "
            "or leave out the distributed part."
        )
