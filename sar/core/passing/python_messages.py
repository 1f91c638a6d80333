"""Python message functions, which run tile by tile, and again in the backward.

[Note: replay]
Messages and intermediate results are freed with their tile, or with the part of it that is computed at once. So the
call is one node of autograd, whose backward processes the tiles in the order of the forward: it fetches a tile's
rows again (or has kept them), runs the function on leaves with these rows, computes the gradients of the
leaves, and returns those of the sources. The exchange always runs to its end, even if few gradients are needed.
The second run has the inputs of the first: the tensors of the time of the call, as a frame may change; the state of
random generators, autocast and modules; and parameters and captured tensors, which are inputs of the node ([Note:
captured tensors]). We check that it computes the same messages ([Note: fingerprints]).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm.group import refuse_transforms
from sar.comm.rows import RowFormat
from sar.comm.tiles import GradientReturn, HaloSlice, Tile, power_of_two
from sar.core.collective import CallContext, ForwardOutput, Operation, TileCall, widest_rows
from sar.core.graph.frames import Frame
from sar.core.modules import views_of_nothing
from sar.core.passing.batches import (
    EdgeBatch,
    EdgeFields,
    Fields,
    MessageFunction,
    RowView,
    checked_results,
    function_name,
    results_on_nothing,
)
from sar.core.passing.captured import AmbientState, Captured, FindCaptured, Fingerprint, StandIns, recorded_alike
from sar.core.passing.reducers import PEAKS, REAL_ONLY, REDUCERS, edge_rows, gather_rows
from sar.core.passing.spot_check import Alone, Change, SpotCheck, refuse_batch_norms
from sar.errors import FieldError, GraphError
from sar.kernels import EdgeBlock, OnlineSoftmax, Target, accumulation_dtype, add_rows
from sar.tensors.views import HALF_BITS

ANY, SOURCES = 1, 2  # flags in the agreement: this worker needs gradients of any input, or of a field of the sources


def run_python(
    context: CallContext, function: MessageFunction, fields: EdgeFields, reducer: str | None, reduced: str | None
) -> dict[str, Tensor]:
    """Call a Python message function on all edges and combine its messages; a collective call.

    Args:
        function: takes an `EdgeBatch`, returns messages, (E_batch, ...) each.
        reducer: one of `REDUCERS`; None to return the messages of all edges.
        reduced: name of the message to reduce; None for all messages.

    Returns:
        (N_dst, ...) for each reduced message, or (E, ...) for each message. If the function asks for exponentials,
        `PEAKS` as well.
    """
    refuse_transforms()  # they would disturb the recording of the function
    recording = record(context, function, fields)
    messages = recording.messages
    if reduced is not None:
        if reduced not in messages:
            raise GraphError(
                f"{function_name(function)} makes {list(messages)}, but the reducer reads {reduced!r}; "
                "use one name for both."
            )
        messages = {reduced: messages[reduced]}
    if not messages:
        return {}
    for name, message in messages.items():
        others = ("sum", "mean") if message.is_complex() else ("sum", "prod") if reduced is None else ()
        if reducer is not None and not message.is_floating_point() and reducer not in others:
            raise GraphError(f"{name!r} of {function_name(function)} is {message.dtype}; {REAL_ONLY}")
    call = PythonCall(context, function, recording, reducer, list(messages))
    return dict(zip([*messages, PEAKS], call.apply(*recording.columns, *recording.captured), strict=False))


# -- recording the function


class Recording(NamedTuple):
    """Inputs and outputs of a message function, recorded in a call on an empty batch."""

    read: list[dict[str, Tensor]]  # the fields of sources, destinations and edges that it reads
    captured: list[Tensor]  # tensors that it uses but are not fields; empty without gradient mode
    messages: dict[str, Tensor]  # its messages, (0, ...) each
    state: AmbientState
    columns: list[Tensor]  # all columns of `read`


def record(context: CallContext, function: MessageFunction, fields: EdgeFields) -> Recording:
    """Record the inputs and outputs of a function in a call on an empty batch, or on one edge if that fails."""
    device, reads = context.structure.device, (set[str](), set[str](), set[str]())
    captured: dict[int, Tensor] = {}
    state = AmbientState(device, function)

    def call(rows: int) -> Mapping[str, Tensor]:
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        samples = [Frame(rows, frame.device, frame.what) for frame in fields]
        for sample, frame in zip(samples, fields, strict=True):
            for name, x in frame.items():
                first = x.detach()[:rows] if len(x) >= rows else x.new_zeros(rows, *x.shape[1:])
                sample[name] = first.requires_grad_(x.requires_grad and torch.is_grad_enabled())
        src, dst, edge = (RowView(sample, Tensor.clone, read) for sample, read in zip(samples, reads, strict=True))
        batch = EdgeBatch(src, dst, edge, context.relation.etype, rows, lambda: (ids, ids, ids))
        arguments = [ids, *(column for sample in samples for column in sample.values())]
        with FindCaptured(arguments) as finder:
            messages = checked_results(function, function(batch), rows)
        captured.update((id(tensor), tensor) for tensor in finder.captured(messages.values()))
        return messages

    with state.restored(), refuse_batch_norms(function_name(function), state):
        recorded = results_on_nothing(function, call)
    read = [{name: frame[name] for name in sorted(names)} for frame, names in zip(fields, reads, strict=True)]
    inputs = list(captured.values()) if torch.is_grad_enabled() else []
    return Recording(read, inputs, dict(recorded), state, [column for columns in read for column in columns.values()])


class _Recorded(dict[str, Tensor]):
    """The recorded fields. Reading any other one raises, because no worker sends it."""

    def __missing__(self, key: str) -> Tensor:
        raise FieldError(
            f"The message function reads {key!r} on some edges only; let it read the same fields whenever it is called."
        )


# -- the call


class ByKind(NamedTuple):
    """Lists with an item for each field of the sources, of the destinations and of the edges that a function reads."""

    src: list[Any]
    dst: list[Any]
    edge: list[Any]


class PythonCall(TileCall):
    """One call of a Python message function: see [Note: replay].

    Its inputs are the fields of sources, destinations and edges, followed by the captured tensors.
    """

    def __init__(
        self,
        context: CallContext,
        function: MessageFunction,
        recording: Recording,
        reducer: str | None,
        reduced: list[str],
    ) -> None:
        reads, made = recording.read[0], {name: recording.messages[name] for name in reduced}
        self.name = function_name(function)
        signature = context.signature(
            f"{reducer or 'apply_edges'} of {self.name}, which reads {_described(reads)} of the sources "
            f"and makes {_described(made)}"
        )
        super().__init__(context, Operation(signature, widest_rows(reads.values()) if reads else None))
        self.names = ByKind(*map(list, recording.read))
        self.num_fields = len(recording.columns)
        self.made = {name: (message.dtype, tuple(message.shape[1:])) for name, message in made.items()}
        self.differentiable = any(message.requires_grad for message in made.values())
        self.new_reducer = partial(REDUCERS[reducer], context.relation)
        read = RowFormat.of([*recording.columns, *recording.messages.values()])
        self.edges_at_once = context.settings.comm_buffer_bytes // max(read.row_bytes, 1)
        self.captured = Captured(function, recording.captured)
        self.state = recording.state
        self.spot_check = SpotCheck(context.relation, self.name, function, recording.state)

    def flags(self) -> int:
        if not self.differentiable:
            return 0
        return ANY | SOURCES * any(self.needs[: len(self.names.src)])

    def by_kind(self, values: Sequence[Any]) -> ByKind:
        """Group the values of all fields by whose fields these are."""
        ends = len(self.names.src), self.num_fields - len(self.names.edge), self.num_fields
        return ByKind(*(list(values[begin:end]) for begin, end in pairwise((0, *ends))))

    # -- forward

    def forward(self, *inputs: Any) -> ForwardOutput:
        columns, captured = [x.detach() for x in inputs[: self.num_fields]], inputs[self.num_fields :]
        fields, leaves = self.by_kind(columns), StandIns(self.captured, captured)
        # Whether the backward computes the gradient of each field.
        sources, others = [bool(self.needed & SOURCES)] * len(fields.src), self.needs[len(fields.src) : len(columns)]
        needs = zip([*sources, *others], columns, strict=True)
        self.wanted = self.by_kind([need and (x.is_floating_point() or x.is_complex()) for need, x in needs])
        self.reducers = {name: self.new_reducer(*row) for name, row in self.made.items()}
        softmax = OnlineSoftmax(self.relation.num_dst, [each.total for each in self.reducers.values()])
        self.fingerprint = Fingerprint(self.context.structure.device)
        for block, tile in self.tiles(fields.src):
            for part in self.parts(block):
                rows = self.rows(part, tile, fields)
                with leaves, self.state.autocast(), recorded_alike(bool(self.needed)):
                    messages = self.run(part, tile, rows, softmax.rise, self.fingerprint)
                if self.spot_check.is_due:
                    made = {name: messages[name] for name in self.reducers}
                    self.spot_check.compare(made, self.on_some_edges(part, tile, rows, softmax, leaves))
                for name, reducer in self.reducers.items():
                    reducer.add(part, messages[name].detach())
                del messages, rows  # free the messages before the next ones
        if self.needed and softmax.peak is not None:
            nodes = torch.arange(self.relation.num_dst, device=softmax.peak.device)
            for each in self.reducers.values():
                self.fingerprint.add_sums(each.total, nodes)
        results, of_reducers = zip(*(reducer.finish() for reducer in self.reducers.values()), strict=True)
        constants = () if softmax.peak is None else (softmax.peak,)
        saved = [*inputs[: self.num_fields], *of_reducers, softmax.peak, *captured]
        return ForwardOutput((*results, *constants), saved, constants)

    def parts(self, block: EdgeBlock) -> list[EdgeBlock]:
        """Split a block so that messages of a part take no more memory than exchange buffers, or than its nodes."""
        size = max(self.edges_at_once, block.num_src + block.num_dst, 1)
        return list(block.pieces(power_of_two(size)))

    def rows(self, block: EdgeBlock, tile: Tile, fields: ByKind) -> ByKind:
        """The fields that the function may read on a block, as leaves: rows of sources, of destinations, and of edges.

        The sources are the block's, the destinations all.
        """
        src = fields.src if tile.rows is None else tile.rows
        columns = ByKind(src, fields.dst, [edge_rows(column, block) for column in fields.edge])
        return ByKind(
            *(
                [column.detach().requires_grad_(need) for column, need in zip(of_kind, wanted, strict=True)]
                for of_kind, wanted in zip(columns, self.wanted, strict=True)
            )
        )

    def run(
        self,
        block: EdgeBlock,
        tile: Tile,
        rows: ByKind,
        exponentials: Callable[..., Tensor],
        fingerprint: Fingerprint,
    ) -> Mapping[str, Tensor]:
        """Call the function on the edges of a block, with fields `rows`; return its messages."""
        ids = block.ids(0, block.num_edges)
        relative: list[Tensor] = []  # scores whose exponentials the function requests

        def exponentials_of(scores: Tensor) -> Tensor:
            relative.append(scores.detach())
            return exponentials(scores, block.renumbered)

        src, dst, edge = (
            _Recorded(zip(names, columns, strict=True)) for names, columns in zip(self.names, rows, strict=True)
        )
        batch = EdgeBatch(
            RowView(src, lambda column: gather_rows(column, block, Target.U)),
            RowView(dst, lambda column: gather_rows(column, block, Target.V)),
            RowView(edge, Tensor.clone),
            self.relation.etype,
            block.num_edges,
            lambda: (*self._find_ends(block, tile.halo), ids.clone()),
            exponentials_of,
        )
        function = self.captured.function
        with views_of_nothing(block.num_edges):
            messages = checked_results(function, function(batch), block.num_edges)
        for name in self.made:
            if name not in messages:
                raise GraphError(f"{self.name} makes {name!r} on some edges only; let it always make the same fields.")
        if self.needed:
            compared = {f"scores {number}": scores for number, scores in enumerate(relative)}
            for key, values in (compared or {key: messages[key] for key in self.made}).items():
                fingerprint.add(key, values.detach(), ids)
        return messages

    def on_some_edges(
        self, part: EdgeBlock, tile: Tile, rows: ByKind, softmax: OnlineSoftmax, leaves: StandIns
    ) -> Alone:
        """The function on some edges of a part, with fields `rows`, for the spot check."""
        destinations, ids = part.destinations(0, part.num_edges), part.ids(0, part.num_edges)

        def alone(few: Tensor, change: Change) -> Mapping[str, Tensor]:
            cols = part.cols[few]
            block = EdgeBlock.from_coo(cols, destinations[few], part.num_src, part.num_dst, edge_ids=ids[few])
            fields = ByKind([*map(change, rows.src)], [*map(change, rows.dst)], [change(x[few]) for x in rows.edge])
            with leaves, self.state.autocast():
                return self.run(block, tile, fields, softmax.exponentials, Fingerprint(few.device))

        return alone

    def _find_ends(self, block: EdgeBlock, halo: HaloSlice | None) -> tuple[Tensor, Tensor]:
        """Global IDs of the edges' sources and destinations, (E_block,) each."""
        structure, relation = self.context.structure, self.relation
        source, _, destination = relation.etype
        cols = block.cols.long()
        if halo is None:
            src = structure.src.ids[source][cols]
        else:
            src = relation.halos[halo.owner][cols + halo.begin].long() + structure.node_ranges[halo.owner][0]
        return src, structure.dst.ids[destination][block.destinations(0, block.num_edges)]

    # -- backward

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        count = self.num_fields + len(self.reducers)
        fields, of_reducers, peak = self.by_kind(saved[: self.num_fields]), saved[self.num_fields : count], saved[count]
        leaves = StandIns(self.captured, saved[count + 1 :])
        softmax, fingerprint = (
            OnlineSoftmax(self.relation.num_dst, (), peak),
            Fingerprint(self.context.structure.device),
        )
        # The peaks, a further result, take no gradient.
        of_results = [each.total_grad(grad) for each, grad in zip(self.reducers.values(), grads, strict=False)]
        totals = ByKind(
            *(
                [x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) if need else None for x, need in pairs]
                for pairs in map(zip, fields, self.wanted)
            )
        )
        of_captured: list[Tensor | None] = [None] * len(leaves.leaves)
        of_sources = [total for total in totals.src if total is not None]
        kinds = {x.dtype for x, total in zip(fields.src, totals.src, strict=True) if total is not None}
        half = kinds.pop() if len(kinds) == 1 and kinds <= HALF_BITS.keys() else None
        returns = GradientReturn(of_sources, add_rows, half=half) if of_sources else None
        # Keep the order of the forward, because the function draws random numbers.
        tiles = self.tiles(fields.src, backward=True, returns=returns, own_first=True)
        with self.state.restored():
            for block, tile in tiles:
                sums = totals
                if tile.halo is not None:
                    of_tile = iter(tile.grads or ())
                    sums = totals._replace(src=[None if each is None else next(of_tile) for each in totals.src])
                for part in self.parts(block):
                    rows = self.rows(part, tile, fields)
                    with torch.enable_grad(), leaves:
                        messages = self.run(part, tile, rows, softmax.exponentials, fingerprint)
                    outputs, of_outputs = [], []
                    for i, (name, reducer) in enumerate(self.reducers.items()):
                        message = messages[name].detach()
                        if peak is not None:
                            fingerprint.add_sums(message, part.destinations(0, part.num_edges))
                        if messages[name].requires_grad:
                            outputs.append(messages[name])
                            of_outputs.append(reducer.message_grad(of_results[i], of_reducers[i], part, message))
                    if outputs:
                        self.add_gradients(part, rows, leaves, outputs, of_outputs, sums, of_captured)
                    del messages, message, outputs, of_outputs, rows  # free the messages before the next ones
        if not fingerprint.equals(self.fingerprint):
            raise GraphError(
                f"{self.name} makes other messages in the backward, where it runs again, than in the forward: it keeps "
                "state, uses its own random generator, or reads something that has changed. Use the default generators "
                "of torch, numpy or Python, and store changing values as features; on a GPU, also call "
                "torch.use_deterministic_algorithms(True)."
            )
        return [*totals.src, *totals.dst, *totals.edge, *of_captured]

    def add_gradients(
        self,
        block: EdgeBlock,
        rows: ByKind,
        leaves: StandIns,
        outputs: list[Tensor],
        of_outputs: list[Tensor],
        sums: ByKind,
        of_captured: list[Tensor | None],
    ) -> None:
        """Add the gradients of a block's leaves to `sums`, and those of captured tensors to `of_captured`."""
        inputs = [leaf for of_kind in rows for leaf in of_kind if leaf.requires_grad]
        wanted = [number for number, leaf in enumerate(leaves.leaves) if leaf.requires_grad]
        leaves.refuse_hidden(outputs, inputs)
        differentiated = [*inputs, *(leaves.leaves[number] for number in wanted)]
        grads = torch.autograd.grad(outputs, differentiated, of_outputs, allow_unused=True)
        grad_of = {id(leaf): grad for leaf, grad in zip(inputs, grads, strict=False) if grad is not None}
        for leaf, total in zip([*rows.src, *rows.dst], [*sums.src, *sums.dst], strict=True):
            if id(leaf) in grad_of:
                total += grad_of[id(leaf)]
        for leaf, total in zip(rows.edge, sums.edge, strict=True):
            if id(leaf) in grad_of and block.edge_ids is None:
                edge_rows(total, block).add_(grad_of[id(leaf)])
            elif id(leaf) in grad_of:
                total.index_add_(0, block.edge_ids, grad_of[id(leaf)].to(total.dtype))
        for number, grad in zip(wanted, grads[len(inputs) :], strict=True):
            before = of_captured[number]
            if grad is not None:
                grad = grad.to(accumulation_dtype(grad.dtype))
                of_captured[number] = grad if before is None else before + grad


def _described(fields: Fields) -> str:
    return ", ".join(f"{k} {v.dtype} {tuple(v.shape[1:])}" for k, v in fields.items()) or "nothing"
