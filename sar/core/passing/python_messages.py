"""Python message functions: run tile by tile, and again in the backward.

[Note: replay]
Nothing that a message function computes outlives its tile, or the part of it that is computed at once. So the call is
one node of autograd, whose backward goes through the tiles in the order of the forward: it fetches a tile's rows again
(or has kept them), runs the function on leaves with these rows, asks autograd for the gradients of the leaves, and
returns those of the sources. The exchange goes on to its end whichever gradients the user asks for. A second run finds
what the first did: the tensors as they were at the call, because a frame may change; random numbers and autocast;
parameters and captured tensors, which are inputs of the node ([Note: captured tensors]).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sar.comm.exchange import Exchange, GradientReturn
from sar.comm.halo_plan import HaloSlice
from sar.comm.rows import FieldFormat, RowFormat
from sar.core.collective import CallContext, Collective, Made, Piece
from sar.core.eager import views_of_nothing
from sar.core.passing.batches import EdgeBatch, RowView, checked_results
from sar.core.passing.exponentials import PEAKS, Peaks
from sar.core.passing.gather import Combined, Reduction, add_to_edges, edge_rows, gather_rows
from sar.core.passing.recording import EdgeFields, PythonMessages, Recording, record
from sar.core.passing.replay import Captured, FindCaptured, StandIns, Surroundings
from sar.core.passing.torch_reductions import TORCH_REDUCERS
from sar.errors import FieldError, GraphError
from sar.kernels import EdgeBlock, Target, accumulation_dtype
from sar.outofcore.residency import roomy

ANY, SOURCES = 1, 2  # flags in the agreement: some input, some field of the sources needs a gradient here


def run_python(
    context: CallContext, messages: PythonMessages, fields: EdgeFields, reducer: str | None, reduced: str | None
) -> dict[str, Tensor]:
    """Call a Python message function on all edges and combine what it makes; a collective call.

    Args:
        context: where the call takes place.
        messages: the function.
        fields: frames of sources, destinations and edges.
        reducer: sum, mean, max or min of the message `reduced`, or one of `TORCH_REDUCERS`; None to return the messages
            of all edges.
        reduced: name of the message to reduce; None for all that the function makes.

    Returns:
        (N_dst, ...) for each reduced field, or (E, ...) for each field that the function makes; where it asks for
        exponentials, `PEAKS` as well.

    Raises:
        GraphError, FieldError: where the function makes or reads different things on different edges.
        CommunicationError: where another worker failed or makes another call.
    """
    recording = record(context, messages, fields)
    made = recording.made
    if reduced is not None:
        if reduced not in made:
            raise GraphError(
                f"{messages.name} makes {list(made)}, but the reducer reads {reduced!r}; use one name for both."
            )
        made = {reduced: made[reduced]}
    if not made:
        return {}
    kind = TORCH_REDUCERS.get(reducer or "", Reduction)
    reductions = {k: kind(context.relation, reducer, m.dtype, tuple(m.shape[1:])) for k, m in made.items()}
    call = PythonCall(context, messages, recording, reductions)
    return dict(zip([*made, PEAKS], call.apply(*recording.columns, *recording.captured), strict=False))


class _Recorded(dict[str, Tensor]):
    """Fields that the recording found; another one is an error, because nobody sends it."""

    def __missing__(self, key: str) -> Tensor:
        raise FieldError(
            f"The message function reads {key!r} on some edges only; let it read the same fields whenever it is called."
        )


@dataclass(frozen=True)
class _BlockRows:
    """What the function is called with on one block: rows of its sources, of all destinations, and of its edges."""

    src: list[Tensor]
    dst: list[Tensor]
    edge: list[Tensor]

    def replaced(self, rows: Sequence[Tensor]) -> "_BlockRows":
        first, second = len(self.src), len(self.src) + len(self.dst)
        return _BlockRows(list(rows[:first]), list(rows[first:second]), list(rows[second:]))

    def all(self) -> list[Tensor]:
        return [*self.src, *self.dst, *self.edge]


class PythonCall(Collective):
    """See [Note: replay]. Its inputs are the fields of sources, destinations and edges, then the captured tensors."""

    def __init__(
        self,
        context: CallContext,
        messages: PythonMessages,
        recording: Recording,
        reductions: dict[str, Reduction],
    ) -> None:
        reducer = next(iter(reductions.values())).reducer
        reads, makes = recording.read.src, {name: recording.made[name] for name in reductions}
        signature = context.signature(
            f"{reducer or 'apply_edges'} of {messages.name}, which reads {_described(reads)} of the sources "
            f"and makes {_described(makes)}"
        )
        super().__init__(context.group, signature, distributed=bool(reads))
        self.context = context
        self.names = [list(fields) for fields in recording.read]
        self.reductions = reductions
        self.differentiable = any(recording.made[name].requires_grad for name in reductions)
        read = RowFormat.of([*recording.columns, *recording.made.values()])
        self.edges_at_once = context.settings.buffer_bytes // max(read.row_bytes, 1)
        self.captured = Captured(messages.function, recording.captured)
        self.messages = replace(messages, function=self.captured.function)
        self.surroundings = Surroundings(context.structure.device)
        self.kept: list[HaloSlice] = []
        self.used: set[int] = set()  # of the captured tensors, by the forward

    def flags(self) -> int:
        if not self.differentiable:
            return 0
        return ANY | SOURCES * any(self.needs[: len(self.names[0])])

    def _split(self, tensors: Sequence[Any]) -> tuple[_BlockRows, list[Any]]:
        """Tensors in the order of the inputs: fields, and what comes after them."""
        given = iter(tensors)
        fields = [[next(given).detach() for _ in names] for names in self.names]
        return _BlockRows(*fields), list(given)

    def _exchange(self, src: list[Tensor]) -> Exchange:
        """The exchange of rows of the sources, or their gradients in float32 at least."""
        widest = RowFormat(tuple(FieldFormat(accumulation_dtype(x.dtype), tuple(x.shape[1:])) for x in src))
        return self.context.exchange(widest, self.signature)

    # -- forward

    def forward(self, *inputs: Any) -> Made:
        columns, captured = self._split(inputs)
        stand_ins = StandIns(self.captured, captured)
        device = self.context.structure.device
        combined = {name: reduction.start() for name, reduction in self.reductions.items()}
        peaks = Peaks(self.context.relation, [each.total for each in combined.values()])
        keep = bool(self.needed) and self.context.settings.keep
        received = (
            self._exchange(columns.src).exchange_tiles(device, columns.src, keep=keep) if self.distributed else None
        )
        kept: list[Tensor] = []
        for piece in self.context.pieces(received):
            if keep and piece.tile is not None and piece.rows is not None:
                self.kept.append(piece.tile)
                kept += piece.rows
            for part in self.parts(piece):
                self._add_messages(part, columns, stand_ins, combined, peaks)
        self.used = stand_ins.used
        results = tuple(reduction.finish(combined[name]) for name, reduction in self.reductions.items())
        fields, constants = inputs[: len(columns.all())], () if peaks.values is None else (peaks.values,)
        saved = [*fields, *(each.argmax for each in combined.values()), peaks.values, *captured, *kept]
        return Made((*results, *constants), saved, constants)

    def _add_messages(
        self, piece: Piece, columns: _BlockRows, stand_ins: StandIns, combined: dict[str, Combined], peaks: Peaks
    ) -> None:
        find = FindCaptured(stand_ins.leaves)
        with find, stand_ins, self.surroundings.autocast():
            made = self.run(piece, self.rows(piece, columns), peaks.rise)
        if find.found and self.needed:
            raise GraphError(
                f"{self.messages.name} uses a tensor of shape {tuple(find.found[0].shape)} that needs a gradient on "
                "some edges only; let it use the same tensors whenever it is called, or set it as a field."
            )
        for name, reduction in self.reductions.items():
            reduction.add(combined[name], made[name].detach(), piece.block)

    def parts(self, piece: Piece) -> list[Piece]:
        """The piece with so few edges at a time that these take what the exchange may, or about what the nodes do."""
        block = piece.block
        size = max(self.edges_at_once, block.num_src + block.num_dst, 1)
        return [piece._replace(block=each) for each in block.pieces(1 << (size.bit_length() - 1))]

    def rows(self, piece: Piece, columns: _BlockRows) -> _BlockRows:
        """What there is to read on the edges of a block."""
        src = columns.src if piece.rows is None else piece.rows
        return _BlockRows(src, columns.dst, [edge_rows(column, piece.block) for column in columns.edge])

    def run(
        self, piece: Piece, rows: _BlockRows, exponentials: Callable[[Tensor, EdgeBlock], Tensor]
    ) -> Mapping[str, Tensor]:
        """What the function makes on the edges of a block."""
        block = piece.block
        src, dst, edge = (
            _Recorded(zip(names, each, strict=True))
            for names, each in zip(self.names, (rows.src, rows.dst, rows.edge), strict=True)
        )
        batch = EdgeBatch(
            RowView(src, lambda column: gather_rows(column, block, Target.U)),
            RowView(dst, lambda column: gather_rows(column, block, Target.V)),
            RowView(edge, lambda column: column),
            self.context.relation.etype,
            block.num_edges,
            lambda: self.messages.find_edges(block, piece.tile),
            lambda scores: exponentials(scores, block),
        )
        function = self.messages.function
        with views_of_nothing(block.num_edges):
            made = checked_results(function, function(batch), block.num_edges)
        for name in self.reductions:
            if name not in made:
                raise GraphError(
                    f"{self.messages.name} makes {name!r} on some edges only; let it always make the same fields."
                )
        return made

    # -- backward

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        columns, rest = self._split(saved)
        count = len(self.reductions)
        rows = rest[count + 1 + len(self.captured.tensors) :]
        stand_ins = StandIns(self.captured, rest[count + 1 : len(rest) - len(rows)])
        peaks = Peaks(self.context.relation, (), rest[count])
        sweep = _BackwardSweep(self, columns, stand_ins, rest[:count], peaks, grads[:count])
        received, device = None, self.context.structure.device
        if self.distributed:
            fields = None if self.context.settings.keep else columns.src
            received = self._exchange(columns.src).exchange_tiles(device, fields, returns=sweep.gradient_return())
        width = len(columns.src)
        kept = {tile: rows[i * width : (i + 1) * width] for i, tile in enumerate(self.kept)}
        with self.surroundings.restored():
            for piece in self.context.pieces(received):
                if piece.tile is not None and piece.rows is None:
                    piece = piece._replace(rows=kept[piece.tile])
                for part in self.parts(piece):
                    sweep.add_gradients(part)
        if stand_ins.used != self.used:
            raise GraphError(
                f"{self.messages.name} uses other tensors in the backward than in the forward, for which "
                "torch.func.functional_call, for example, had given its layers other weights. Let it take such tensors "
                "from variables around it, or set them as fields."
            )
        return [*sweep.totals, *sweep.captured]


class _BackwardSweep:
    """Adds up the gradients of a call's inputs, block by block."""

    def __init__(
        self,
        call: PythonCall,
        columns: _BlockRows,
        stand_ins: StandIns,
        argmax: Sequence[Tensor | None],
        peaks: Peaks,
        grads: Sequence[Tensor],
    ) -> None:
        self.call = call
        self.columns = columns
        self.stand_ins = stand_ins
        self.argmax = argmax
        self.peaks = peaks
        self.result_grads = [
            reduction.total_grad(grad) for reduction, grad in zip(call.reductions.values(), grads, strict=True)
        ]
        sources = [bool(call.needed & SOURCES)] * len(columns.src)
        self.needs = [*sources, *call.needs[len(sources) : len(columns.all())]]
        self.totals = [
            roomy(x.shape, accumulation_dtype(x.dtype), x.device, zeros=True)
            if need and x.is_floating_point()
            else None
            for x, need in zip(columns.all(), self.needs, strict=True)
        ]
        self.wanted = [number for number, leaf in enumerate(stand_ins.leaves) if leaf.requires_grad]
        self.captured: list[Tensor | None] = [None] * len(stand_ins.leaves)

    def gradient_return(self) -> GradientReturn | None:
        """Where the other workers' gradients of source fields go; None where nobody needs one."""
        totals = [total for total in self.totals[: len(self.columns.src)] if total is not None]
        return self.call.context.return_to(totals) if totals else None

    def add_gradients(self, piece: Piece) -> None:
        """Run the function on a block once more, and add the gradients of what it used."""
        call, stand_ins = self.call, self.stand_ins
        rows = call.rows(piece, self.columns)
        leaves = [
            each.detach() if total is None else each.detach().requires_grad_()
            for each, total in zip(rows.all(), self.totals, strict=True)
        ]
        with torch.enable_grad(), stand_ins:
            made = call.run(piece, rows.replaced(leaves), self.peaks.exponentials)
        messages, grads = [], []
        for i, (name, reduction) in enumerate(call.reductions.items()):
            if made[name].requires_grad:
                messages.append(made[name])
                grad, message = self.result_grads[i], made[name].detach()
                grads.append(reduction.message_grad(grad, self.argmax[i], piece.block, message))
        if not messages:
            return
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        reached = stand_ins.reached(messages)
        used = [*inputs, *(stand_ins.leaves[i] for i in self.wanted), *(stand_ins.captured[i] for i in reached)]
        found = torch.autograd.grad(messages, used, grads, allow_unused=True)
        self._add_to_fields(piece, found[: len(inputs)])
        for number, grad in zip([*self.wanted, *reached], found[len(inputs) :], strict=True):
            before = self.captured[number]
            if grad is not None:
                grad = grad.to(accumulation_dtype(grad.dtype))
                self.captured[number] = grad if before is None else before + grad

    def _add_to_fields(self, piece: Piece, found: Sequence[Tensor | None]) -> None:
        given, returned = iter(found), iter(piece.grads or ())
        first_edge_field = len(self.columns.src) + len(self.columns.dst)
        for i, total in enumerate(self.totals):
            if total is None:
                continue
            grad = next(given)
            if piece.tile is not None and i < len(self.columns.src):
                total = next(returned)
            if grad is None:
                continue
            if i < first_edge_field:
                total += grad
            else:
                add_to_edges(total, piece.block, grad)


def _described(fields: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{k} {v.dtype} {tuple(v.shape[1:])}" for k, v in fields.items()) or "nothing"
