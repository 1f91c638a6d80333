"""Overlaps a layer's own computation, such as `fc_self` of `SAGEConv`, with the messages of a call.

[Note: two halves]
Such a call is two nodes of autograd, tied by an empty tensor. The first agrees, posts the first messages and pauses.
Then the layer's own computation runs, and the second node goes through the tiles. Autograd runs nodes in the reverse
order of their creation, so in the backward, too, the layer's own computation runs between the halves. The same messages
travel in the same order as in one node. If the layer's computation fails in the backward, this worker's next agreement
finishes the call, because other workers wait for it.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sar.comm.gradients import refuse_average
from sar.core.collective import ForwardOutput, NotTwice, TileCall
from sar.errors import GraphError
from sar.host.per_thread import PerThread

Steps = Generator[None, None, None]
"""One direction of a call, as a generator that yields where it may pause."""


class Overlapping(TileCall):
    """A collective that may pause while its first messages travel."""

    # Subclasses define these: `forward` and `backward`, which set `output` instead of returning it.
    forward_steps: Callable[..., Steps]
    backward_steps: Callable[..., Steps]
    output: Any  # what the steps have computed; taken away by whoever returns it
    _rest: Steps | None = None  # the unfinished rest of one direction, for which other workers may be waiting

    def forward(self, *inputs: Any) -> ForwardOutput:
        for _ in self.forward_steps(*inputs):
            pass
        return vars(self).pop("output")

    def backward(self, saved: list[Any], *grads: Tensor) -> Sequence[Tensor | None]:
        for _ in self.backward_steps(saved, *grads):
            pass
        return vars(self).pop("output")

    def pause(self, steps: Steps) -> None:
        """Run the first step. `resume`, or else the group's next agreement, runs the rest."""
        assert self.group is not None
        next(steps)
        self._rest, self.group.paused = steps, self.finish

    def finish(self) -> None:
        """Run the remaining steps, unless they have been run."""
        assert self.group is not None
        if self.group.paused == self.finish:
            self.group.paused = None
        steps, self._rest = self._rest, None
        if steps is not None:
            self.group.check()
            with torch.no_grad():
                for _ in steps:
                    pass

    def resume(self) -> Any:
        """Run the remaining steps, and return the result without keeping a reference to it."""
        with self.guard():
            self.finish()
            return vars(self).pop("output")

    def apply_beside(self, work: Callable[[], Tensor], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the results as two nodes of autograd, with other work between them."""
        with self.guard():
            tie, before = _FirstHalf.apply(self.anchor(inputs), self, *inputs), _versions(inputs)
            work()
            if _versions(inputs) != before:
                raise GraphError(
                    "A layer changes its input in place while rows of it travel to other workers: a module such as "
                    "fc_self or lin_r, or a hook of one. Let it work on a copy, as without inplace=True."
                )
            results: tuple[Tensor, ...] = _SecondHalf.apply(tie, self)
        return results


waiting_work = PerThread[Callable[[], Tensor] | None](None)
"""The work of `meanwhile`, until a call takes it."""


@contextmanager
def meanwhile(work: Callable[[], Tensor]) -> Iterator[Callable[[], Tensor]]:
    """Context in which the first call that can overlap with other work runs `work`: see [Note: two halves].

    It yields a function that returns the result, which it computes on first use if no call has done so.
    """
    result = cache(work)
    with waiting_work.set_to(result):
        yield result


def _versions(inputs: Sequence[Tensor | None]) -> list[int]:
    """Number of in-place changes of each input, if torch counts them."""
    return [x._version for x in inputs if x is not None and not x.is_inference()]


class _FirstHalf(torch.autograd.Function):
    """Begins a forward, and ends its backward: see [Note: two halves]."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Overlapping, *inputs: Tensor | None) -> Tensor:
        with call.guard():
            call.begin_forward()
            call.pause(call.forward_steps(*inputs))
        ctx.call = call
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, tie: Tensor) -> Any:
        call: Overlapping = ctx.call
        return call.end_backward(call.resume(), tie)


class _SecondHalf(torch.autograd.Function):
    """Ends a forward, and begins its backward."""

    @staticmethod
    def forward(ctx: Any, tie: Tensor, call: Overlapping) -> tuple[Tensor, ...]:
        return call.end_forward(ctx, call.resume())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: Overlapping = ctx.call
        refuse_average()
        with torch.no_grad(), call.guard():
            call.pause(call.backward_steps(call.begin_backward(ctx), *grads))
        tie = torch.empty(0, device="cpu")
        return *(NotTwice.apply([tie], *call.input_ties, *grads) if torch.is_grad_enabled() else (tie,)), None
