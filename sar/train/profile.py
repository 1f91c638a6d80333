"""`sar.profile()`: time, bytes and waits of training by layer and direction, as a table.

For a timeline, use the traces of `torch.profiler`, in which sar names tiles, waits and kernels.

[Note: whose time it is]
At every event below, the seconds, bytes and memory since the last event are charged to the current module or
distributed call. In a forward, the current module is the innermost one, according to torch's hooks. In a backward, it
is the module whose output gradient was completed last; so code between two layers, such as an activation, is charged to
the layer that comes first in the forward. A distributed call outside modules is charged separately. At the end, the
modules that directly made distributed calls are the layers. A layer includes its submodules; the rest is "everything
else": loss, optimizer, and modules around the layers.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from sar.comm.group import Group
from sar.comm.session import current_group
from sar.comm.statistics import BACKWARD, Statistics, listeners, statistics
from sar.comm.transport import Spilled
from sar.errors import ConfigError
from sar.host.cuda import PeakCudaMemory
from sar.host.memory import PeakMemory
from sar.partition.inspect.text_tables import as_text

ELSEWHERE = "everything else"
_HOOKED = "sar.profile"
_CALL_NAME = re.compile(r"[:;(]| of ")  # ends the name of a call in the text that workers compare
_LAYER_WIDTH = 16
_LEAST_SECONDS = 1e-3  # below this, differences between workers are noise
_NOTE = """Seconds; MB of a million bytes. By layer: means of the workers, but MB peak is
the most of any, above the level before. max/mean: compute of the slowest one."""
_TURNS = """Seconds are those of each worker's turns; MB that left memory are the most at any turn."""


@dataclass(frozen=True)
class Spent:
    """Time, memory and traffic of one worker in one row of the table.

    layer: name of a module, or of a distributed call outside modules, or `ELSEWHERE`.
    direction: "forward" or "backward"; empty for calls outside modules and `ELSEWHERE`.
    seconds: time including waits.
    peak: peak resident memory (on CUDA devices, of tensors) above the level before the profile, in bytes; None if not
        measured.
    moved: traffic and waiting times.
    """

    layer: str
    direction: str
    seconds: float = 0.0
    peak: int | None = None
    moved: Statistics = field(default_factory=Statistics)

    def __add__(self, other: "Spent") -> "Spent":
        peaks = [row.peak for row in (self, other) if row.peak is not None]
        seconds, moved = self.seconds + other.seconds, self.moved + other.moved
        return replace(self, seconds=seconds, peak=max(peaks, default=None), moved=moved)

    @property
    def compute(self) -> float:
        """Seconds without waits."""
        return self.seconds - self.moved.seconds_waited


@dataclass
class Profile:
    """The measurements of `sar.profile`, complete when its context ends.

    workers: costs by rank.
    spilled: spilled bytes by rank; empty unless workers train out of core.
    """

    workers: list[list[Spent]] = field(default_factory=list)
    spilled: list[Spilled] = field(default_factory=list)

    def table(self) -> str:
        """Format the time by layer and worker as a table of 80 columns, the same on all workers."""
        if not self.workers:
            raise ConfigError("The profile is not complete; ask for it after the end of `with sar.profile() as p:`.")
        totals = [total(rows) for rows in self.workers]
        layers: list[tuple[str, ...]] = [("layer", "pass", "compute", "wait", "MB out", "MB in", "MB peak", "max/mean")]
        for of_workers in (*by_layer(self.workers), totals):
            layer, uneven = of_workers[0].layer, imbalance(of_workers)
            name = layer if len(layer) <= _LAYER_WIDTH else f"…{layer[1 - _LAYER_WIDTH :]}"
            cells = _cells(total(of_workers), len(of_workers))
            layers.append((name, of_workers[0].direction, *cells, "-" if uneven is None else f"{uneven:.2f}"))
        each: list[tuple[str, ...]] = [("worker", "compute", "wait", "of it late", "MB out", "MB in", "MB peak")]
        for rank, row in enumerate(totals):
            compute, wait, *moved = _cells(row, 1)
            each.append((str(rank), compute, wait, _number(row.moved.seconds_late, 3), *moved))
        how_many = f"{len(totals)} worker{'s' if len(totals) > 1 else ''}"
        title = f"profile of {max(row.seconds for row in totals):.2f} s on {how_many}"
        if len(totals) > 1:
            slowest = max(range(len(totals)), key=lambda rank: totals[rank].compute)
            late = [row.moved.seconds_late for rank, row in enumerate(totals) if rank != slowest]
            title += f"\nworker {slowest} computed longest, {totals[slowest].compute:.2f} s; "
            title += f"the others waited {sum(late) / len(late):.2f} s for late workers"
        pieces = [title, as_text(layers), as_text(each, left=1), _NOTE]
        if self.spilled:
            turns: list[tuple[str, ...]] = [("worker", "MB left memory", "MB written", "MB read")]
            turns += [(str(rank), *(_number(size / 1e6, 2) for size in row)) for rank, row in enumerate(self.spilled)]
            pieces += [as_text(turns, left=1), _TURNS]
        return "\n\n".join(pieces)


def total(rows: Sequence[Spent]) -> Spent:
    """The sum of all rows, with the maximum of their peaks."""
    return sum(rows, Spent("all", ""))


def by_layer(workers: Sequence[Sequence[Spent]]) -> list[list[Spent]]:
    """The costs of each worker by layer and direction, in the order of a worker's rows; `ELSEWHERE` is last."""
    keys = dict.fromkeys((row.layer, row.direction) for rows in workers for row in rows)
    keys[ELSEWHERE, ""] = keys.pop((ELSEWHERE, ""), None)
    spent = [{(row.layer, row.direction): row for row in rows} for rows in workers]
    return [[rows.get(key, Spent(*key)) for rows in spent] for key in keys]


def imbalance(of_workers: Sequence[Spent]) -> float | None:
    """Maximum divided by mean compute of the workers; None if times are too short."""
    mean = total(of_workers).compute / len(of_workers)
    return max(row.compute for row in of_workers) / mean if mean >= _LEAST_SECONDS else None


def _cells(spent: Spent, workers: int) -> list[str]:
    """Compute, wait, MB out and MB in, each averaged over workers; and the peak."""
    moved = [_number(size / 1e6 / workers, 2) for size in (spent.moved.bytes_sent, spent.moved.bytes_received)]
    peak = "-" if spent.peak is None else _number(spent.peak / 1e6, 1)
    return [_number(spent.compute / workers, 3), _number(spent.moved.seconds_waited / workers, 3), *moved, peak]


def _number(value: float, digits: int) -> str:
    """Format a number in six characters."""
    return f"{value:.{digits if value < 10 ** (5 - digits) else 0}f}"


@contextmanager
def profile() -> Iterator[Profile]:
    """Measure time, traffic and memory of each layer: `with sar.profile() as p: ...`, then `print(p.table())`.

    Yields a `Profile`, which is filled at the end. All workers enter and leave together; an exception inside stops all
    workers.

    Raises:
        ConfigError: another profile is active.
        NotInitializedError: before `sar.initialize_comms`.
    """
    group, profiled = current_group(), Profile()
    if listeners:
        raise ConfigError("sar.profile is taken inside another one; end that one first.")
    recorder = _Recorder(group)
    try:
        with group.guard():  # workers may arrive at different times
            group.agree("the beginning of sar.profile")
        with recorder:
            yield profiled
        call = "the end of sar.profile"
        with group.guard():
            group.agree(call)
            own = [recorder.spilled(), *map(astuple, recorder.spent())]
            everybodys = group.gather_json(own, call)
    except BaseException as error:
        group.abort(error)
        raise
    profiled.workers = [[replace(Spent(*row), moved=Statistics(*row[-1])) for row in rows] for _, *rows in everybodys]
    profiled.spilled = [Spilled(*spilled) for spilled, *_ in everybodys if spilled is not None]


class _Turn(NamedTuple):
    """The current module or call: names of modules, outermost first, or of a call outside modules; else empty."""

    path: tuple[str, ...] = ()
    direction: str = ""


class _Recorder:
    """Records modules and distributed calls of this process while active: see [Note: whose time it is]."""

    def __init__(self, group: Group) -> None:
        self._clock = group.clock
        self._spilled_so_far = group.spilled
        self._left = 0
        self._memory: PeakMemory | PeakCudaMemory | None = None
        if len(group.local_peers) == 1:
            self._memory = PeakCudaMemory() if torch.cuda.is_initialized() else PeakMemory()
        self._names: dict[Module, str] = {}
        self._layers: set[str] = set()
        self._outside: set[str] = set()  # calls outside modules, by the name of their backwards
        self._spent: dict[_Turn, Spent] = {}
        self._turns = [_Turn()]
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
        """Costs by layer, in the order of first use, forward before backward; everything else comes last."""
        rows: dict[tuple[str, str], Spent] = {}
        for turn, spent in self._spent.items():
            layer = next((name for name in reversed(turn.path) if name in self._layers), ELSEWHERE)
            key = (layer, "" if layer == ELSEWHERE else turn.direction)
            rows[key] = rows.get(key, Spent(*key)) + spent
        order = [*dict.fromkeys(layer for layer, _ in rows if layer != ELSEWHERE), ELSEWHERE]
        return sorted(rows.values(), key=lambda row: (order.index(row.layer), row.direction == "backward"))

    def spilled(self) -> Spilled | None:
        """Spilled bytes; None unless workers train out of core."""
        before, now = self._spilled_before, self._spilled_so_far()
        if before is None or now is None:
            return None
        return Spilled(self._left, now.written - before.written, now.read - before.read)

    def begins(self, call: str) -> None:
        """Called when a distributed call begins."""
        turn, forward = self._turns[-1], call.removeprefix(BACKWARD)
        if not turn.path or forward in self._outside:
            direction = "" if forward == call else "backward"
            turn = _Turn((_CALL_NAME.split(forward)[0],), direction)
        if turn.direction != "backward":
            self._layers.add(turn.path[-1])
        self._take_turn(turn)

    def ends(self, call: str) -> None:
        """Called when the call ends."""
        if not self._turns[-1].direction:
            self._outside.add(f"{call}; call {current_group().call_id}")
        self._end_turn()

    def _enters(self, module: Module, _: Any) -> None:
        if self not in listeners or torch.compiler.is_compiling():  # the module of another worker of this process
            return
        if module not in self._names:  # names are relative to the outermost module that was called
            for name, inner in module.named_modules():
                name = name or type(module).__name__
                numbered = (f"{name} {k}" if k > 1 else name for k in count(1))
                taken = set(self._names.values())
                self._names.setdefault(inner, next(one for one in numbered if one not in taken))
        self._take_turn(_Turn((*self._turns[-1].path, self._names[module]), "forward"))

    def _leaves(self, module: Module, _: Any, results: Any) -> None:
        if self not in listeners or torch.compiler.is_compiling():
            return
        path = self._turns[-1].path
        self._end_turn()
        for result in tree_leaves(results):
            node = result.grad_fn if isinstance(result, Tensor) else None
            # If a module returns the output of a submodule, the submodule is charged.
            metadata: Any = None if node is None else node.metadata
            if node is not None and _HOOKED not in metadata:
                metadata[_HOOKED] = True
                node.register_prehook(lambda grads, path=path: self._goes_back(path))

    def _goes_back(self, path: tuple[str, ...]) -> None:
        """Called when the gradient of a module's output is complete."""
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
        """Charge the costs since the last event to the current module or call."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now, counted = self._clock(), statistics()
        spilled = self._spilled_so_far()
        if spilled is not None:
            self._left = max(self._left, spilled.left)
        peak = None
        if self._memory is not None:
            peak = self._memory.above_baseline()
            self._memory.restart()
        turn = self._turns[-1]
        passed = Spent("", "", now - self._since, peak, counted - self._counted)
        self._spent[turn] = self._spent.get(turn, Spent("", "")) + passed
        self._since, self._counted = now, counted
