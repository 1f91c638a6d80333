"""What users combine, axis by axis, and cases that take one value of each.

Cases are numbered. Each is the one of some random draws that has most pairs of values which few cases before it have,
so that all pairs that can be combined soon are. Its number alone says what it is.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations

import torch

from tests.combinations.calls import CALLS
from tests.parity.scenarios import SCENARIOS

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {"size 1": 1.0, "size 1e-30": 1e-30, "size 100": 100.0, "size 1e4": 1e4}
SETTINGS = {
    "default settings": {},
    "tiny tiles": {"comm_buffer_bytes": 512},
    "no pipeline": {"pipeline_depth": 0},
    "small messages": {"max_collective_size": 16, "pipeline_depth": 3},
    "bfloat16 on the wire": {"wire_dtype_features": torch.bfloat16},
    "bfloat16 gradients on the wire": {"wire_dtype_gradients": torch.bfloat16},
}
PLAIN = "plain"
AXES: dict[str, tuple[str, ...]] = {
    "workers": ("1 worker", "2 workers", "3 workers", "2 in turns", "3 in turns", "2 x 2 in turns"),
    "mode": ("mode 1", "mode 2", "mode 3"),
    "settings": tuple(SETTINGS),
    "graph": tuple(SCENARIOS),
    "dtype": tuple(DTYPES),
    "size": tuple(SIZES),
    "call": tuple(CALLS),
    "second": (PLAIN, *CALLS),
    "joined": ("beside", "behind"),
    "inputs": (
        PLAIN,
        "x without gradient",
        "edges without gradient",
        "half of the weights frozen",
        "strided",
        "expanded",
    ),
    "forward": (
        *(PLAIN, "checkpoint", "reentrant checkpoint", "saved on CPU", "anomaly mode", "autocast", "forward hook"),
        *("forward pre-hook", "replaced forward", "weights made by a function"),
    ),
    "between": (
        *(PLAIN, "settings changed", "fields overwritten", "evaluation between", "inference mode before"),
        *("weights changed", "inputs changed", "self-loops added"),
    ),
    "backward": (
        *(PLAIN, "two backwards", "autograd.grad", "second derivative", "gradient hook", "loss of some rows"),
    ),
}
"""The values of each axis; those named "plain" stand for nothing special, and no pairs of them are counted."""

CHANGED = ("weights changed", "inputs changed")
HALVES = ("bfloat16 on the wire", "bfloat16 gradients on the wire")
QUICK, ALL = 48, 600
"""Cases of `make test`, and of `make test-all`."""
DRAWN = 15
"""Draws of which one becomes a case."""


@dataclass(frozen=True)
class Case:
    """One value of each axis; `second` is another call on what `call` was given, or on what it made."""

    number: int
    workers: str
    mode: str
    settings: str
    graph: str
    dtype: str
    size: str
    call: str
    second: str
    joined: str
    inputs: str
    forward: str
    between: str
    backward: str

    def __str__(self) -> str:
        return f"case {self.number}: " + " | ".join(value for _, value in self.values())

    def values(self) -> Iterator[tuple[str, str]]:
        """The values that are something special, each with its axis."""
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != PLAIN and (field.name != "joined" or self.second != PLAIN):
                yield field.name, value

    def pairs(self) -> list[tuple[str, str]]:
        """All that is combined; a second call counts as a call."""
        return [(min(a, b), max(a, b)) for (_, a), (_, b) in combinations(self.values(), 2)]

    @property
    def calls(self) -> list[str]:
        return [name for name in (self.call, self.second) if name != PLAIN]

    @property
    def tolerance(self) -> float:
        """Of the largest number of a result."""
        eps = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 0.08}[self.dtype]
        if self.forward == "autocast":
            eps = max(eps, 0.08)
        if self.settings in HALVES:
            eps = max(eps, 0.05)
        if any(CALLS[name].attention for name in self.calls):  # errors of scores, which are squares, become relative
            eps *= max(1.0, SIZES[self.size] ** 2 / 10)
        return eps

    @property
    def rounds(self) -> bool:
        """Whether values are rounded to half precision on their way."""
        return self.dtype == "bfloat16" or self.forward == "autocast" or self.settings in HALVES

    @property
    def jumps(self) -> bool:
        """Whether derivatives may be others, as maxima are where values are rounded, or lost beside a bias."""
        return any(CALLS[name].exact for name in self.calls) and (self.rounds or self.size == "size 1e-30")

    @property
    def runs_here(self) -> bool:
        """Whether torch has all that it takes on this processor: an LSTM under autocast needs AVX-512."""
        autocast_lstm = self.forward == "autocast" and "SAGEConv lstm" in self.calls
        return not autocast_lstm or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    @property
    def can_be(self) -> bool:
        """Whether the values can be combined, and compared with one machine."""
        calls = [CALLS[name] for name in self.calls]
        return not (
            self.tolerance > 0.35
            or (self.second == PLAIN and self.joined == "behind")
            or (self.joined == "behind" and CALLS[self.call].edges)
            or (self.graph in ("one node", "no edges") and any(call.several for call in calls))
            or (self.forward == "autocast" and self.dtype != "float32")
            or (self.backward == "second derivative" and self.inputs == "x without gradient")
            or (
                self.backward == "autograd.grad"
                and (self.inputs == "x without gradient" or self.forward == "reentrant checkpoint")
            )
            or (self.backward == "second derivative" and self.forward == "reentrant checkpoint")
            or (self.inputs == "x without gradient" and self.forward == "reentrant checkpoint")
            or (self.backward == "two backwards" and self.between in CHANGED)
            or (self.between == "inputs changed" and self.inputs == "expanded")
            # There torch looks at no version, or computes with what it finds.
            or (self.between in CHANGED and self.forward in ("saved on CPU", "checkpoint", "reentrant checkpoint"))
            or (self.between == "settings changed" and self.forward in ("checkpoint", "reentrant checkpoint"))
        )


@cache
def cases(count: int) -> list[Case]:
    """The first cases."""
    met: Counter[tuple[str, str]] = Counter()
    found: list[Case] = []
    while len(found) < count:
        number = len(found)
        generator = random.Random(number)
        drawn: list[Case] = []
        while len(drawn) < DRAWN:
            case = Case(number, **{axis: _draw(generator, axis, values) for axis, values in AXES.items()})
            if case.can_be:
                drawn.append(case)
        best = max(drawn, key=lambda case: sum(1 / (1 + met[pair]) ** 2 for pair in case.pairs()))
        met.update(best.pairs())
        found.append(best)
    return found


def _draw(generator: random.Random, axis: str, values: tuple[str, ...]) -> str:
    """One of the values; nothing special, and the simplest, more often than the rest, so that faults stand out."""
    if values[0] == PLAIN and generator.random() < 0.4:
        return PLAIN
    if axis in ("size", "dtype", "settings") and generator.random() < 0.3:
        return values[0]
    return generator.choice(values)
