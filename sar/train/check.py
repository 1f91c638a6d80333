"""`sar.check_model`: whether several workers compute what one process computes, and if not, which module differs first.

[Note: two runs]
Each worker reads the same sample of the graph and runs the model on it alone. Then all workers run the model together,
each on its share of the nodes. Both runs are in float64 if the model allows it, so that differences are no rounding
errors. Dropout is off, because workers draw other numbers than one process. What modules return is compared by sums of
powers over all rows. These depend neither on the order of rows nor on the number of calls, so they are the same even if
a module is called once for each tile of messages. If the runs differ, they are repeated with hooks on all modules; not
before, because layers may take a slower path around modules with hooks.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sar.adapters.dgl.load import load_dgl_partition_data, on_device
from sar.comm import session
from sar.comm.collectives import all_max, all_sum
from sar.comm.rows import BufferPool
from sar.common_tuples import EID, ETYPE, NID, CanonicalEtype, PartitionData, ShardEdgesAndFeatures, StrPath
from sar.core.regroup import deal_parts, regroup, runs_of
from sar.errors import ConfigError, PeerError
from sar.outofcore.workers import run_in_turns
from sar.storage.partition_json import read_partition_json
from sar.train.counted_graph import CountingGroup

LossOf = Callable[[nn.Module, PartitionData], Tensor]
Event = tuple[str, str]  # the name of a module, and "input" or "output"

_DROPOUT: Final = re.compile("(feature_)?(alpha_)?dropout([123]d|_)?")


def check_model(model: nn.Module, loss_of: LossOf, directory: StrPath, *, nodes: int = 10_000) -> str:
    """Compare outputs, loss and gradients of all workers with those of one process; a collective call.

    Finds code that takes the rows of one worker for all rows, such as `x.mean(0)`, `BatchNorm1d` or a loss divided by
    the local count. A single worker is compared to two workers of its process. Computes in float64 and without dropout,
    on copies of the model, and leaves torch's random state as it is.

    Args:
        model: alike on all workers; in training or evaluation mode, whichever is to be checked.
        loss_of: called as `loss_of(model, data)` with a worker's partition. Makes the graph from `data`, and returns
            the loss as the training script does, before its backward. Features and labels must come from `data`.
        directory: the partition directory, or its JSON file.
        nodes: about how many nodes to check. Of a larger graph, that is every k-th node of each type with all of its
            in-edges, which begin at the nearest of these nodes. Each worker holds them with the activations of the
            model and, while it reads, one partition.

    Returns:
        A sentence that says what was compared.

    Raises:
        ConfigError: on all workers, if something differs; names the first module that does, and the likely cause. Also
            if there is nothing to compare, because no parameter has a gradient or the loss is not finite.
        PeerError: if `loss_of` raised on another worker.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel) or "_orig_mod" in model._modules:  # torch.compile
        model = next(model.children())
    with session.current_group().guard() as group:
        workers = max(group.world_size, 2)
        check = _Check(model, loss_of, *_read_sample(directory, nodes, workers))
        if group.world_size > 1:
            same, text = check.compare(group.rank)
        else:
            threads = run_in_turns(workers, check.compare, None)
            for error in sorted(threads.failures.values(), key=lambda error: isinstance(error, PeerError)):
                raise error
            same, text = threads.results[0]
    if not same:
        raise ConfigError(text)
    return text


class _Run(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    trace: dict[Event, Tensor]  # power sums, in order of execution


class _Check:
    """Runs a model on a sample, on one process and on all workers; see [Note: two runs]."""

    def __init__(self, model: nn.Module, loss_of: LossOf, sample: PartitionData, ranges: list[tuple[int, int]]) -> None:
        self.model, self.loss_of, self.sample, self.ranges = model, loss_of, sample, ranges
        self.double, alone = True, None
        with suppress(Exception):  # such as of code that makes float32 tensors
            alone = self.run()
        self.double = not all_max(alone is None)
        self.alone = alone if alone is not None and self.double else self.run()
        self.tolerance = 1e-6 if self.double else 1e-3

    def run(self, rank: int | None = None, *, traced: bool = False, seed: int = 0) -> _Run:
        """Run a copy of the model, forward and backward, as one of the workers, or on one process with all nodes."""
        model = deepcopy(self.model).double() if self.double else deepcopy(self.model)
        model.zero_grad()
        for module in model.modules():
            rate = "p" if isinstance(module, _DropoutNd) else "dropout"  # some layers read it
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
        trace: dict[Event, Tensor] = {}

        def note(event: Event, _: nn.Module, *values: Any) -> None:
            for x in tree_leaves(values if event[1] == "input" else values[1]):
                if isinstance(x, Tensor) and x.is_floating_point():
                    trace[event] = _power_sums(x) + trace.get(event, 0)

        hooks = []
        for name, module in model.named_modules() if traced else [("", model)]:
            hooks.append(module.register_forward_pre_hook(partial(note, (name, "input")), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(note, (name, "output"))))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        default = torch.get_default_dtype()
        alone = session.standing_in(CountingGroup(0, 1), BufferPool(torch.device("cpu")))
        random_state = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with alone if rank is None else nullcontext(), random_state, torch.enable_grad(), _DropoutOff():
            torch.manual_seed(seed)
            torch.set_default_dtype(torch.float64 if self.double else default)
            try:
                loss = self.loss_of(model, on_device(self.share(rank), device))
                for hook in hooks:
                    hook.remove()  # the backward may call modules again
                if all_max(not isinstance(loss, Tensor) or not loss.requires_grad):
                    raise ConfigError("loss_of has to return a loss with a gradient, on every worker.")
                loss.backward()
            finally:
                torch.set_default_dtype(default)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in named}
        return _Run(loss.detach(), gradients, trace)

    def share(self, rank: int | None) -> PartitionData:
        """Copy the nodes of a worker, or all, with the edges into them."""

        def copy(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
            wide = torch.float64 if self.double else None
            return {name: x.to(wide if x.is_floating_point() else None, copy=True) for name, x in features.items()}

        [(edges, features)] = self.sample.all_shard_edges
        data = self.sample._replace(
            all_shard_edges=[ShardEdgesAndFeatures(edges, copy(features))],
            node_features=copy(self.sample.node_features),
        )
        return data if rank is None else regroup({0: data}, self.ranges, rank)

    def compare(self, rank: int) -> tuple[bool, str]:
        """Run with all workers, and tell what is equal, or what differs and why; the same text on all workers."""
        alone, tolerance = self.alone, self.tolerance
        weights = torch.stack([_power_sums(p) for p in self.model.parameters() if not is_lazy(p)])
        if not torch.equal(all_max(weights), -all_max(-weights)):
            return False, "The parameters of the model differ between workers: call sar.sync_params(model) first."
        greatest = max((_greatest(grad) for grad in alone.gradients.values()), default=0.0)
        if not greatest or not alone.loss.isfinite():
            return (
                False,
                f"Nothing can be compared: the loss is {alone.loss:.6g}, the greatest gradient {greatest:.6g}.",
            )
        own = self.run(rank)
        loss, gradients = all_sum((own.loss, [*own.gradients.values()]))
        wrong = [
            name
            for (name, grad), total in zip(alone.gradients.items(), gradients, strict=True)
            if not _greatest(total - grad) <= tolerance * _greatest(grad) + tolerance**2 * greatest  # or it is NaN
        ]
        differing = ["outputs"] if ("", "output") in self.unequal(alone, own, tolerance) else []
        if not (loss - alone.loss).abs() <= tolerance * alone.loss.abs() + tolerance**2:
            differing.append(f"the loss ({loss:.6g}, on one process {alone.loss:.6g})")
        if wrong:
            differing.append(f"{len(wrong)} of {len(gradients)} gradients, such as that of {wrong[-1]}")
        runs = f"on {len(self.ranges)} workers and on one process, for {self.ranges[-1][1]} nodes in {loss.dtype}"
        if differing:
            return False, f"Different {runs}: {', '.join(differing)}. {self.cause(rank, differing[0])}"
        outputs = "outputs, " if ("", "output") in alone.trace else ""
        return True, f"Equal {runs}: {outputs}the loss ({loss:.6g}) and {len(gradients)} gradients."

    def cause(self, rank: int, differing: str) -> str:
        """Repeat the runs with hooks, and tell which module is the first to differ, and the likely cause."""
        alone, again, own = self.run(traced=True), self.run(traced=True, seed=1), self.run(rank, traced=True)
        event = next(iter(self.unequal(alone, own, self.tolerance / 1e3)), None)
        if event is None:
            if "loss" in differing:
                return (
                    "All modules return the same, so the loss itself is no share of the loss over all nodes: divide the "
                    "sum over this worker's nodes, or those in its mask, by the number on all workers (sar.Task.loss)."
                )
            return (
                "All modules return the same, so gradients are lost: something is detached on a worker, or comes from "
                "sar.all_sum, which has no gradient."
            )
        name, end = event
        kind = type(self.model.get_submodule(name)).__name__
        first = f"The first difference is in the {end} of {name or 'the model'} ({kind})"
        if not _alike(again.trace[event], alone.trace[event], self.tolerance):
            return (
                f"{first}, which depends on random numbers. Only dropout is off during a check: turn off other draws."
            )
        if "Norm" in kind and end == "output":
            return f"{first}, which normalises by the rows of one worker: use sar.convert_batchnorm or sar.pyg.convert_norms."
        return (
            f"{first}. Code {'before' if end == 'input' else 'in'} it takes the rows of one worker for all rows, as in "
            "x.mean(0) or x.std(0), or changes their order. sar.all_sum adds up those of all workers."
        )

    def unequal(self, alone: _Run, own: _Run, tolerance: float) -> list[Event]:
        """The events that differ: neither their rows nor those of one worker are those of the single process."""
        zeros = torch.zeros(2, 5, dtype=torch.float64)
        sums = all_sum([own.trace.get(event, zeros) for event in alone.trace])
        return [
            event
            for (event, one), total in zip(alone.trace.items(), sums, strict=True)
            if not _alike(total, one, tolerance) and not _alike(total / len(self.ranges), one, tolerance)
        ]


class _DropoutOff(TorchFunctionMode):
    """Makes functional dropout the identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _DROPOUT.fullmatch(getattr(func, "__name__", "")):
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


def _power_sums(x: Tensor) -> Tensor:
    """Sums of x^k and |x|^k over all elements for k = 0 to 4, (2, 5); of a scalar, which may be a share, for k = 1."""
    x = x.detach().double().nan_to_num(0, 0, 0).cpu()
    powers = range(5) if x.dim() else (0, 1, 1, 1, 1)
    return torch.stack([torch.stack([(y**k).sum() for k in powers]) for y in (x, x.abs())])


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    allowed = tolerance * other[1] + tolerance**2 * other[1, 0]
    return bool(((one - other).abs() <= allowed).all())


def _greatest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _read_sample(directory: StrPath, nodes: int, workers: int) -> tuple[PartitionData, list[tuple[int, int]]]:
    """Read about so many nodes of a directory as one partition, with the range of node IDs of each worker."""
    spec = read_partition_json(directory)
    starts, ends = (torch.from_numpy(bound.copy()) for bound in np.moveaxis(spec.node_ranges, 2, 0))  # (P, T)
    step = max(1, -(-int(ends.max()) // nodes))
    sizes = (ends - starts + step - 1) // step
    # Each type of a partition is cut into pieces if there are fewer partitions than workers.
    pieces = 1 if spec.num_parts >= workers else workers
    cuts = (torch.arange(pieces + 1)[:, None] * sizes[:, None] + pieces - 1) // pieces  # (P, pieces + 1, T)
    counts = cuts.diff(dim=1)
    shift = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts) - cuts[:, :-1]

    def renumber(ids: Tensor) -> tuple[Tensor, Tensor]:
        """New IDs of nodes, or of the nearest sampled ones before them, and which of them are sampled."""
        run = torch.searchsorted(ends.flatten(), ids, right=True)
        part, kind, place = run // ends.shape[1], run % ends.shape[1], ids - starts.flatten()[run]
        piece = place // step * pieces // sizes[part, kind]
        return shift[part, piece, kind] + place // step, place % step == 0

    def thin(shard: ShardEdgesAndFeatures, etypes: list[CanonicalEtype]) -> ShardEdgesAndFeatures:
        (src, dst), features = shard
        new, kept = renumber(dst)
        rows = {":".join(etype): kept[features[ETYPE] == kind] for kind, etype in enumerate(etypes) if len(etypes) > 1}
        thinned = {name: x[rows.get(name.partition("/")[0], kept)] for name, x in features.items()}
        return ShardEdgesAndFeatures((renumber(src)[0][kept], new[kept]), thinned)

    parts = {}
    for part in range(spec.num_parts):
        with session.standing_in(CountingGroup(part, spec.num_parts), BufferPool(torch.device("cpu"))):
            data = load_dgl_partition_data(spec.path, part, "cpu")
        new, kept = renumber(torch.arange(*data.node_ranges[part]))
        order = new[kept].argsort()
        parts[part] = data._replace(
            all_shard_edges=[thin(shard, data.edge_type_names) for shard in data.all_shard_edges],
            node_ranges=runs_of(sizes.sum(1).tolist()),
            node_features={
                name: x[::step] if "/" in name else x[kept][order] for name, x in data.node_features.items()
            },
            partition_book=None,
        )
    per_piece = counts.sum(2).flatten().tolist()
    bounds = [0, *accumulate(per_piece)]
    ranges = [(bounds[run.start], bounds[run.stop]) for run in deal_parts(per_piece, workers)]
    whole = regroup(parts, [(0, bounds[-1])], 0)
    whole.node_features[NID] = torch.arange(bounds[-1])
    ids = whole.all_shard_edges[0].edge_features
    ids[EID] = ids[EID].argsort().argsort()  # without gaps
    return whole, ranges
