"""`sar.profile()`: where the time of training goes, by layer and direction.

[Note: whose time it is]
All of a worker's time is somebody's: at every event below, what has passed since the last one, in seconds, bytes and
memory, is added to whom it was the turn of. In a forward it is the turn of the innermost module, which hooks of torch
tell. In a backward it is that of the module whose result's gradient was the last to be complete; so what lies between
two layers, such as an activation, goes to the one before it in the forward. A distributed call outside all modules has
a turn of its own. At the end, modules within which a distributed call was made directly are the layers: each takes what
its inner modules had, and what is left is "everything else": loss, optimiser, and modules around the layers.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as hooks
from torch.profiler import profile as torch_profile
from torch.utils._pytree import tree_leaves

from sar.comm.collectives import all_gather_json
from sar.comm.group import Group
from sar.comm.session import current_group
from sar.comm.statistics import BACKWARD, Statistics, listeners, statistics
from sar.comm.transport import Spilled
from sar.common_tuples import StrPath
from sar.errors import ConfigError
from sar.host.cuda import PeakCudaMemory
from sar.host.memory import PeakMemory
from sar.ranges import named, traced
from sar.train.profile_report import ELSEWHERE, Spent, draw, tables

_HOOKED = "sar.profile"
_CALL_NAME = re.compile(r"[:;(]| of ")  # what the name of a call ends before, in the text that workers compare


class Profile:
    """What a profile has found; made by `sar.profile`, and complete when that ends.

    workers: what each worker spent, by rank.
    spilled: what each worker spilled, by rank; empty where memory is left to none.
    """

    def __init__(self) -> None:
        self.workers: list[list[Spent]] = []
        self.spilled: list[Spilled] = []
        self._trace: torch_profile | None = None

    def table(self) -> str:
        """Where the time went, by layer and by worker, 80 columns wide and the same on all workers."""
        return tables(self._found(), self.spilled)

    def picture(self, file: StrPath) -> None:
        """Draw the same as bars.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        draw(self._found(), file)

    def chrome_trace(self, file: StrPath) -> None:
        """Write this worker's trace for https://ui.perfetto.dev; give each worker a file of its own.

        Raises:
            ConfigError: the profile was taken without `trace=True`.
        """
        if self._trace is None:
            raise ConfigError("This profile has no trace: take it with sar.profile(trace=True).")
        self._trace.export_chrome_trace(str(file))

    def _found(self) -> list[list[Spent]]:
        if not self.workers:
            raise ConfigError("The profile is not complete; ask for it after the end of `with sar.profile() as p:`.")
        return self.workers


@contextmanager
def profile(*, trace: bool = False) -> Iterator[Profile]:
    """Measure what each layer takes inside, in either direction: `with sar.profile() as p: ...; print(p.table())`.

    All workers enter and leave together. An exception that leaves it ends the group, like one in a distributed call.

    Args:
        trace: record a trace with `torch.profiler` too, for `Profile.chrome_trace`. It takes hundreds of MB, so memory
            is not measured then. Default False.

    Raises:
        ConfigError: a profile is being taken already, or a trace by `torch.profiler`; or workers that share a
            process want a trace.
        NotInitializedError: before `sar.initialize_comms`.
    """
    group, found = current_group(), Profile()
    if trace and len(group.local_peers) > 1:
        raise ConfigError(
            "torch.profiler traces processes, and this one has several workers: take sar.profile() without a trace."
        )
    if listeners or (trace and traced()):
        raise ConfigError("sar.profile is taken inside another one, or inside torch.profiler; end that one first.")
    recorder = _Recorder(group, measures_memory=not trace)
    if trace:
        found._trace = torch_profile()
        found._trace.start()
    try:
        with group.guard():  # after what takes each worker its own time
            group.agree(f"the beginning of sar.profile(trace={trace})")
        with recorder:
            yield found
        found.workers, found.spilled = _gathered(group, recorder.spent(), recorder.spilled())
    except BaseException as error:
        group.abort(error)
        raise
    finally:
        if found._trace is not None:
            found._trace.stop()


def _gathered(group: Group, own: list[Spent], spilled: Spilled | None) -> tuple[list[list[Spent]], list[Spilled]]:
    """What all workers spent and spilled, by rank."""
    call = "the end of sar.profile"
    with group.guard():
        group.agree(call)
        told = all_gather_json(partial(group.all_gather, call=call), [spilled, *map(astuple, own)])
    workers = [[replace(Spent(*one), moved=Statistics(*one[-1])) for one in rows] for _, *rows in told]
    return workers, [Spilled(*one) for one, *_ in told if one is not None]


class _Turn(NamedTuple):
    """Whose time it is: names of modules, outermost first, or of a call outside all; none for everything else."""

    path: tuple[str, ...] = ()
    direction: str = ""


class _Recorder:
    """Follows modules and distributed calls of this process while active: see [Note: whose time it is]."""

    def __init__(self, group: Group, *, measures_memory: bool) -> None:
        self._clock = group.clock
        self._spilled_so_far = group.spilled
        self._left = 0
        self._memory: PeakMemory | PeakCudaMemory | None = None
        if measures_memory and len(group.local_peers) == 1:
            self._memory = PeakCudaMemory() if torch.cuda.is_initialized() else PeakMemory()
        self._names: dict[Module, str] = {}
        self._layers: set[str] = set()
        self._outside: set[str] = set()  # outside all modules, as their backwards name them
        self._spent: dict[_Turn, Spent] = {}
        self._turns = [_Turn()]
        self._ranges: list[AbstractContextManager[Any]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enters),
            hooks.register_module_forward_hook(self._leaves, always_call=True),
        ]
        listeners.append(self)
        self._since, self._counted = self._clock(), statistics()
        self._spilled_before = self._spilled_so_far()

    def __exit__(self, *_: object) -> None:
        self._charge()
        listeners.remove(self)
        for handle in self._handles:
            handle.remove()

    def spent(self) -> list[Spent]:
        """By layer, in the order of their first turns, forward before backward; everything else comes last."""
        rows: dict[tuple[str, str], Spent] = {}
        for turn, spent in self._spent.items():
            layer = self._layer(turn)
            key = (layer, "" if layer == ELSEWHERE else turn.direction)
            rows[key] = rows.get(key, Spent(*key)) + spent
        order = [*dict.fromkeys(layer for layer, _ in rows if layer != ELSEWHERE), ELSEWHERE]
        return sorted(rows.values(), key=lambda row: (order.index(row.layer), row.direction == "backward"))

    def spilled(self) -> Spilled | None:
        """What left memory; None where nothing is to."""
        before, now = self._spilled_before, self._spilled_so_far()
        if before is None or now is None:
            return None
        return Spilled(self._left, now.written - before.written, now.read - before.read)

    def begins(self, call: str) -> None:
        """A distributed call begins."""
        turn, forward = self._turns[-1], call.removeprefix(BACKWARD)
        if not turn.path or forward in self._outside:
            direction = "" if forward == call else "backward"
            turn = _Turn((_CALL_NAME.split(forward)[0],), direction)
        if turn.direction != "backward":
            self._layers.add(turn.path[-1])
        self._take_turn(turn)
        self._ranges.append(named(f"{self._layer(turn)} {turn.direction}".rstrip()))
        self._ranges[-1].__enter__()

    def ends(self, call: str) -> None:
        """It is over."""
        if not self._turns[-1].direction:
            self._outside.add(f"{call}; call {current_group().call_id}")
        self._ranges.pop().__exit__(None, None, None)
        self._end_turn()

    def _layer(self, turn: _Turn) -> str:
        """Whom a turn counts for, as far as is known by now."""
        return next((name for name in reversed(turn.path) if name in self._layers), ELSEWHERE)

    def _enters(self, module: Module, _: Any) -> None:
        if self in listeners and not torch.compiler.is_compiling():
            self._take_turn(_Turn((*self._turns[-1].path, self._name(module)), "forward"))

    def _leaves(self, module: Module, _: Any, results: Any) -> None:
        if self not in listeners or torch.compiler.is_compiling():  # the module of another worker of this process
            return
        path = self._turns[-1].path
        self._end_turn()
        for result in tree_leaves(results):
            node = result.grad_fn if isinstance(result, Tensor) else None
            # A module that returns what an inner one has made leaves it to that.
            metadata: Any = None if node is None else node.metadata
            if node is not None and _HOOKED not in metadata:
                metadata[_HOOKED] = True
                node.register_prehook(lambda grads, path=path: self._goes_back(path))

    def _goes_back(self, path: tuple[str, ...]) -> None:
        """The gradient of what a module has returned is complete."""
        if self not in listeners:
            return
        if self._turns[-1].direction == "backward":
            self._end_turn()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_turn)
        self._take_turn(_Turn(path, "backward"))

    def _take_turn(self, turn: _Turn) -> None:
        self._charge()
        self._turns.append(turn)

    def _end_turn(self) -> None:
        self._charge()
        self._turns.pop()

    def _charge(self) -> None:
        """Add what has passed since the last event to whom it was the turn of."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now, counted = self._clock(), statistics()
        spilled = self._spilled_so_far()
        if spilled is not None:
            self._left = max(self._left, spilled.left)
        turn, peak = self._turns[-1], None
        if self._memory is not None:
            peak = self._memory.above_baseline()
            self._memory.restart()
        passed = Spent("", "", now - self._since, peak, counted - self._counted)
        self._spent[turn] = self._spent.get(turn, Spent("", "")) + passed
        self._since, self._counted = now, counted

    def _name(self, module: Module) -> str:
        """Its name within the outermost module that was called, or its class; numbered where several have the same."""
        if module not in self._names:
            for name, inner in module.named_modules():
                name = name or type(module).__name__
                numbered = (f"{name} {k}" if k > 1 else name for k in count(1))
                taken = set(self._names.values())
                self._names.setdefault(inner, next(one for one in numbered if one not in taken))
        return self._names[module]
