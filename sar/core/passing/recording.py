"""What a Python message function reads, captures and makes: it is called on no edges, before any communication."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.halo_plan import HaloSlice
from sar.core.collective import CallContext
from sar.core.passing.batches import EdgeBatch, Fields, RowView, checked_results, function_name, results_on_nothing
from sar.core.passing.replay import FindCaptured, forked_generators
from sar.kernels import EdgeBlock

MessageFunction = Callable[[EdgeBatch], Mapping[str, Tensor]]
FindEdges = Callable[[EdgeBlock, HaloSlice | None], tuple[Tensor, Tensor, Tensor]]


class EdgeFields(NamedTuple):
    """Fields of the sources, of the destinations and of the edges."""

    src: Fields
    dst: Fields
    edge: Fields


@dataclass(frozen=True)
class PythonMessages:
    """A message function in Python.

    function: takes an `EdgeBatch`, returns messages, (E_batch, ...) each.
    find_edges: global IDs of sources and destinations, and edge IDs, of the edges of a block.
    """

    function: MessageFunction
    find_edges: FindEdges

    @property
    def name(self) -> str:
        """What errors call the function."""
        return function_name(self.function)


@dataclass(frozen=True)
class Recording:
    """What a message function does, as it showed when it was called on no edges.

    read: the fields that it reads.
    captured: tensors that it was not given; none without gradient mode.
    made: (0, ...) each.
    """

    read: EdgeFields
    captured: list[Tensor]
    made: dict[str, Tensor]

    @property
    def columns(self) -> list[Tensor]:
        return [column for fields in self.read for column in fields.values()]


class _Sample(dict[str, Tensor]):
    """A few rows of each of a frame's fields, cut off from autograd's graph."""

    def __init__(self, fields: Fields, rows: int) -> None:
        super().__init__()
        self.fields = fields
        for name, column in fields.items():
            first = column.detach()[:rows]
            if len(first) < rows:
                first = first.new_zeros(rows, *column.shape[1:])
            self[name] = first.requires_grad_(column.requires_grad and torch.is_grad_enabled())

    def __missing__(self, key: str) -> Tensor:
        return self.fields[key]  # raises the frame's own error


def record(context: CallContext, messages: PythonMessages, fields: EdgeFields) -> Recording:
    """Find out what the function reads, captures and makes, on no edges where it can do without."""
    etype, reads = context.relation.etype, (set[str](), set[str](), set[str]())
    captured: dict[int, Tensor] = {}

    def call(rows: int) -> Mapping[str, Tensor]:
        ids = torch.zeros(rows, dtype=torch.int64, device=context.structure.device)
        samples = [_Sample(frame, rows) for frame in fields]
        src, dst, edge = (
            RowView(sample, lambda column: column, read) for sample, read in zip(samples, reads, strict=True)
        )
        batch = EdgeBatch(src, dst, edge, etype, rows, lambda: (ids, ids, ids))
        given = [ids, *(column for sample in samples for column in sample.values())]
        with FindCaptured(given, constants=True) as finder:
            made = checked_results(messages.function, messages.function(batch), rows)
        captured.update((id(tensor), tensor) for tensor in finder.captured)
        return made

    with torch.random.fork_rng(forked_generators(context.structure.device)):
        made = results_on_nothing(messages.function, call)
    columns = [{name: frame[name] for name in sorted(read)} for frame, read in zip(fields, reads, strict=True)]
    return Recording(EdgeFields(*columns), list(captured.values()) if torch.is_grad_enabled() else [], dict(made))
