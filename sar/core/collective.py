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

[Note: two halves]
What a layer computes beside a call (`meanwhile`) can hide the wire. The call is two nodes of autograd then, tied by an
empty tensor. The first agrees, and waits until another thread has posted the first messages and computed the own edges.
The second waits for the rest of what that thread does. Autograd runs nodes in the reverse order
of their making, so in the backward, too, the layer's own computation stands between the halves. What travels, and in
which order, is as in one node. After an error between the halves, the thread still does what other workers wait for.

[Note: second derivatives]
There are none, and to ask for one raises. torch's `once_differentiable` is not enough: where the loss is linear in a
result, or where autograd is asked for the gradients of some inputs only, it leaves out this call's part in silence. So
a gradient that is made to be differentiated again depends, by a node that raises, on all that the call was given.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm import beside, session
from sar.comm.exchange import OWN_ROWS, Exchange, Tile
from sar.comm.gradients import refuse_average
from sar.comm.group import Group
from sar.comm.rows import FieldFormat, RowFormat
from sar.comm.settings import SMALL_TILE, Settings
from sar.comm.statistics import BACKWARD
from sar.core.relation import Relation, Structure
from sar.errors import GraphError
from sar.kernels import EdgeBlock, accumulation_dtype
from sar.per_thread import PerThread
from sar.ranges import named
from sar.raw_memory import empty_spillable


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

    def exchange(self, widest: RowFormat, signature: str, *, both_ways: bool = True) -> Exchange:
        """The exchange of a call along the relation; see `Exchange`."""
        plan, pool = self.relation.plan, session.current().pool
        return Exchange(self.group, plan, self.settings, widest, pool, signature, both_ways=both_ways)

    def can_hide_wire(self, x: Tensor) -> bool:
        """Whether work beside a call that sends rows of (N_src, ...) x can hide the wire; equal on all workers."""
        few = self.relation.plan.mean_rows * RowFormat.of([x]).row_bytes < SMALL_TILE
        # Another thread would be on another CUDA device, and in a stream of its own.
        on_cpu = x.device.type == self.group.device.type == "cpu"
        return on_cpu and not few and len(self.group.local_peers) == 1

    def tiles(self, received: Iterable[Tile] | None) -> Iterator[tuple[EdgeBlock, Tile]]:
        """All edges of the relation, with the tile that they read; the own ones while the first messages travel.

        Edges that read this worker's rows come with `OWN_ROWS`. `received` is the exchange, which has begun; None where
        nothing travels.
        """
        if received is None:
            yield from ((block, OWN_ROWS) for block in self.relation.blocks)
            return
        for tile in received:
            halo = tile.halo
            if halo is None:
                with named("own edges"):
                    yield self.relation.blocks[self.structure.part], tile
                if (thread := beside.current()) is not None:
                    thread.mostly_waits.set()
                continue
            with named(f"tile {halo.begin}-{halo.end} of worker {halo.owner}"):
                if tile.sources is None:
                    yield self.relation.tile(halo), tile
                else:
                    yield self.relation.in_place(halo.owner, tile.sources), tile


class ForwardOutput(NamedTuple):
    """What a forward has made: what the caller gets, and what the backward needs."""

    results: tuple[Tensor, ...]
    saved: Sequence[Tensor | None] = ()
    constants: tuple[Tensor, ...] = ()  # those of the results that never take a gradient


class Meanwhile:
    """What a layer computes beside a call, or else once it is asked for."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work
        self._made: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._made is None:
            self._made = self._work()
        return self._made


_meanwhile = PerThread[Meanwhile | None](None)


@contextmanager
def meanwhile(work: Callable[[], Tensor]) -> Iterator[Meanwhile]:
    """Have the first call inside that can hide the wire compute `work` beside it: see [Note: two halves]."""
    made = Meanwhile(work)
    with _meanwhile.set_to(made):
        yield made


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
        self._rest: Callable[[], Any] | None = None
        self.given = torch.empty(0, device="cpu")  # stands for all inputs: see [Note: second derivatives]

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

    def can_hide_wire(self, *inputs: Any) -> bool:
        """Whether other work gains from being computed beside, where the call is distributed; equal on all workers."""
        return False

    def flags(self) -> int:
        """What this worker adds to the agreement: up to 63 bits, of which the OR over workers is `needed`."""
        return sum(need << i for i, need in enumerate(self.needs))

    def apply(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the results, as one node of autograd, or as two."""
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled() and self.distributed, device="cpu")
        (self.given,) = _NotTwice.apply([self.given], *inputs)
        work = _meanwhile.value
        results: tuple[Tensor, ...]
        if work is None or not self.distributed or not self.can_hide_wire(*inputs):
            results = _Node.apply(anchor, self, *inputs)
            return results
        _meanwhile.value = None
        with self.guard():
            tie, before = _FirstHalf.apply(anchor, self, *inputs), _versions(inputs)
            work()
            if _versions(inputs) != before:
                raise GraphError(
                    "A layer changes its input in place while rows of it travel to other workers: a module such as "
                    "fc_self or lin_r, or a hook of one. Let it work on a copy, as without inplace=True."
                )
            results = _SecondHalf.apply(tie, self)
        return results

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
        return _NotTwice.apply(found, self.given, *grads) if torch.is_grad_enabled() else tuple(found)

    def run_beside(self, rest: Callable[[], Any]) -> None:
        """Run the rest of a direction beside this thread, until `take_rest`."""
        assert self.group is not None
        self._rest = self.group.run_beside(rest)

    def take_rest(self) -> Any:
        """What `run_beside` has made; nothing is left of it here."""
        rest, self._rest = self._rest, None
        assert rest is not None
        with self.guard():
            return rest()


def _versions(inputs: Sequence[Tensor | None]) -> list[int]:
    """How often torch has changed each in place, where it counts that."""
    return [x._version for x in inputs if x is not None and not x.is_inference()]


class _Node(torch.autograd.Function):
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


class _FirstHalf(torch.autograd.Function):
    """What begins a forward, and ends its backward: see [Note: two halves]."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Collective, *inputs: Tensor | None) -> Tensor:
        with call.guard():
            call.begin_forward(ctx, inputs)
            call.run_beside(partial(call.forward, *inputs))
        ctx.call = call
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, tie: Tensor) -> Any:
        call: Collective = ctx.call
        return call.end_backward(call.take_rest(), tie)


class _SecondHalf(torch.autograd.Function):
    """What ends a forward, and begins its backward."""

    @staticmethod
    def forward(ctx: Any, tie: Tensor, call: Collective) -> tuple[Tensor, ...]:
        return call.end_forward(ctx, call.take_rest())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: Collective = ctx.call
        if call.distributed:
            refuse_average()
        with torch.no_grad(), call.guard():
            call.run_beside(partial(call.backward, call.begin_backward(ctx), *grads))
        tie = torch.empty(0, device="cpu")
        return *(_NotTwice.apply([tie], call.given, *grads) if torch.is_grad_enabled() else (tie,)), None


class _NotTwice(torch.autograd.Function):
    """Hands on tensors as made of others, and raises where autograd comes to it."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor | None], *others: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise GraphError(
            "A distributed call would be differentiated twice, but sar has first derivatives only. Detach the first, "
            "or leave out the distributed part."
        )
