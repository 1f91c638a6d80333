"""Operations that all workers compute together, as nodes of autograd: the one place that knows how they keep in step.

[Note: one worker's gradient is everybody's]
A backward that communicates must run on all workers or on none. So what needs a gradient is the OR over workers, agreed
on in the forward, and the autograd node exists on every worker: it is tied to an empty tensor, the anchor, that
requires a gradient, and its results are marked non-differentiable where nobody needs one. The backward begins with an
agreement of its own, which names the forward by its number, so that no gradients of two calls that look alike can meet.

[Note: saved tensors]
What a backward needs is saved through autograd, so that checkpointing and offloading can take it away. The backward
unpacks it first, before it communicates: there torch notices fields that were changed in place, and runs a
checkpointed forward again. Unless the graph is retained, the list is then the only owner: what a backward takes out of
it and lets go of is free.

[Note: second derivatives]
There are none, and to ask for one raises. torch's `once_differentiable` is not enough: where the loss is linear in a
result, or where autograd is asked for the gradients of some inputs only, it leaves out this call's part in silence. So
a gradient that is made to be differentiated again depends, by a node that raises, on all that the call was given.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.exchange import OWN_ROWS, Exchange, Layout, Tile
from sar.comm.gradients import refuse_average
from sar.comm.group import Group
from sar.comm.rows import FieldFormat, RowFormat
from sar.comm.settings import SMALL_TILE, Settings
from sar.comm.statistics import BACKWARD
from sar.core.relation import Relation, Structure
from sar.errors import GraphError
from sar.kernels import EdgeBlock, accumulation_dtype
from sar.ranges import named, traced
from sar.spillable import empty_spillable


@dataclass(frozen=True)
class CallContext:
    """Where a call takes place: along which relation of which graph, and with which settings, in both directions."""

    structure: Structure
    relation: Relation
    settings: Settings

    @property
    def group(self) -> Group:
        return self.structure.group

    def signature(self, call: str) -> str:
        """The text by which workers compare a call: what it is, along what, in which graph, with which settings."""
        return (
            f"{call}; along {self.relation.etype}, gradients {'on' if torch.is_grad_enabled() else 'off'}, "
            f"graph {self.structure.signature}, {self.settings}"
        )

    def layout(self, widest: RowFormat, *, both_ways: bool = True) -> Layout:
        """The tiles of a call along the relation that sends rows of at most `widest`; see `Layout`."""
        return Layout.of(self.relation.plan, self.settings, widest, both_ways=both_ways)

    def exchange(self, layout: Layout, signature: str) -> Exchange:
        """An exchange of the call, in one direction."""
        pool = session.current().pool
        return Exchange(self.structure.group, self.relation.plan, self.settings, layout, pool, signature)

    def can_hide_wire(self, x: Tensor) -> bool:
        """Whether work beside a call that sends rows of x, (N_src, ...), hides messages; equal on all workers."""
        few = self.relation.plan.mean_rows * x.itemsize * x.shape[1:].numel() < SMALL_TILE
        on_cpu = x.device.type == self.group.device.type == "cpu"
        return on_cpu and not few and len(self.group.local_peers) == 1

    def tiles(self, received: Iterable[Tile] | None) -> Iterable[tuple[EdgeBlock, Tile]]:
        """All edges of the relation, each block with the tile it reads; the own ones while the first messages travel.

        Edges that read this worker's rows come with `OWN_ROWS`. `received` is the exchange, which has begun; None if
        nothing travels.
        """
        if received is None:
            return [(block, OWN_ROWS) for block in self.relation.blocks]
        return self._placed(received)

    def _placed(self, received: Iterable[Tile]) -> Iterator[tuple[EdgeBlock, Tile]]:
        for tile in received:
            halo = tile.halo
            if halo is None:
                block = self.relation.blocks[self.structure.part]
            elif tile.sources is None:
                block = self.relation.tile(halo)
            else:
                block = self.relation.in_place(halo.owner, tile.sources)
            if traced():
                with named("own edges" if halo is None else f"tile {halo.begin}-{halo.end} of worker {halo.owner}"):
                    yield block, tile
            else:
                yield block, tile


class ForwardOutput(NamedTuple):
    """What a forward has made: what the caller gets, and what the backward needs."""

    results: tuple[Tensor, ...]
    saved: Sequence[Tensor | None] = ()
    constants: tuple[Tensor, ...] = ()  # those of the results that never take a gradient


def widest_row(fields: Sequence[Tensor]) -> RowFormat:
    """What may travel of a row: that of the fields, or its gradients in float32 at least."""
    return RowFormat(tuple(FieldFormat(accumulation_dtype(x.dtype), tuple(x.shape[1:])) for x in fields))


def zero_total(field: Tensor) -> Tensor:
    """Where the gradients of a field are added up, in float32 at least; other workers may add to it."""
    return empty_spillable(field.shape, accumulation_dtype(field.dtype), field.device, zeros=True)


class Collective(ABC):
    """One call of an operation: subclasses say what it computes. Made anew for each call, and applied once."""

    def __init__(self, group: Group | None, signature: str, *, distributed: bool = True) -> None:
        self.group = group  # None for an operation of this worker alone
        self.signature = signature  # by which workers compare the call; see `CallContext.signature`
        self.distributed = distributed and group is not None and group.world_size > 1
        self.needs: tuple[bool, ...] = ()  # whether each input needs a gradient on this worker
        self.all_flags: list[int] = []  # of every worker; see `flags`
        self.needed = 0  # what needs a gradient on any worker; bit i is input i, unless `flags` says otherwise
        self.dtypes: list[torch.dtype | None] = []  # of the inputs
        self.number = 0  # of the forward; see `Group.call_id`
        self.given: list[Tensor] = []  # empty tensors made of the inputs: see [Note: second derivatives]

    @abstractmethod
    def forward(self, *inputs: Any) -> ForwardOutput:
        """Compute the results from inputs that are tensors or None; `needs` and `needed` are known."""

    @abstractmethod
    def backward(self, saved: list[Any], *grads: Tensor) -> Sequence[Tensor | None]:
        """The gradient of each input, or None where it needs none here, from those of the results."""

    @property
    def backward_communicates(self) -> bool:
        """Whether workers must meet in the backward; equal on all of them."""
        return self.distributed

    def flags(self) -> int:
        """What this worker adds to the agreement: up to 63 bits, of which the OR over workers is `needed`."""
        bits = 0
        for i, need in enumerate(self.needs):
            bits |= need << i
        return bits

    def apply(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the results, as one node of autograd."""
        results: tuple[Tensor, ...] = Node.apply(self.anchor(*inputs), self, *inputs)
        return results

    def anchor(self, *inputs: Tensor | None) -> Tensor:
        """Ties the node to autograd on every worker: see [Note: one worker's gradient is everybody's]."""
        grad = torch.is_grad_enabled()
        if grad:
            self.given = [(x[:0] if x.dim() else x).clone() for x in inputs if x is not None and x.requires_grad]
        return torch.empty(0, requires_grad=grad and self.distributed, device="cpu")

    def begin(self, what: str, flags: int = 0, *, communicates: bool) -> list[int]:
        """Begin one direction, with an agreement where it communicates; return all workers' flags, or one's own."""
        if self.group is not None and communicates:
            return self.group.agree(what, flags)
        if self.group is not None:
            self.group.follow(what)
        return [flags]

    def guard(self) -> AbstractContextManager[object]:
        """The group's guard, where there is a group."""
        return nullcontext() if self.group is None else self.group.guard()

    # -- what the nodes of autograd have in common

    def begin_forward(self, ctx: Any, inputs: Sequence[Tensor | None]) -> None:
        """Agree on the forward."""
        self.needs = ctx.needs_input_grad[2:]
        self.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        self.all_flags = self.begin(self.signature, self.flags(), communicates=self.distributed)
        self.needed = reduce(or_, self.all_flags)
        self.number = 0 if self.group is None else self.group.call_id

    def end_forward(self, ctx: Any, made: ForwardOutput) -> tuple[Tensor, ...]:
        """Save what the backward needs; give the results."""
        ctx.call = self
        if self.needed:
            ctx.save_for_backward(*made.saved)
            constants = [r for r in made.results if not r.is_floating_point() and not r.is_complex()]
            ctx.mark_non_differentiable(*made.constants, *constants)
        else:
            ctx.mark_non_differentiable(*made.results)
        return made.results

    def begin_backward(self, ctx: Any) -> list[Any]:
        """Agree on the backward; give what was saved for it."""
        saved = list(ctx.saved_tensors)  # unpacked once, as checkpoints require
        ctx.maybe_clear_saved_tensors()
        self.begin(f"{BACKWARD}{self.signature}; call {self.number}", communicates=self.backward_communicates)
        return saved

    def end_backward(self, made: Sequence[Tensor | None], *grads: Tensor) -> Any:
        """The gradients of what a node was given: an anchor, the call, and its inputs."""
        wanted = zip(made, self.dtypes, self.needs, strict=True)
        found = [None, None, *(g.to(dtype) if need and g is not None else None for g, dtype, need in wanted)]
        return NotTwice.apply(found, *self.given, *grads) if torch.is_grad_enabled() else tuple(found)


class Node(torch.autograd.Function):
    """See [Note: one worker's gradient is everybody's] and [Note: saved tensors]."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Collective, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        with call.guard():
            call.begin_forward(ctx, inputs)
            made = call.forward(*inputs)
        return call.end_forward(ctx, made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: Collective = ctx.call
        if call.distributed:
            refuse_average()
        with torch.no_grad(), call.guard():
            made = call.backward(call.begin_backward(ctx), *grads)
        return call.end_backward(made, *grads)


class NotTwice(torch.autograd.Function):
    """Identity of the first argument that depends on all; its backward raises, to forbid double backward."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor | None], *others: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise GraphError(
            "A distributed call would be differentiated twice, but sar has first derivatives only. Detach the first, "
            "or leave out the distributed part."
        )
