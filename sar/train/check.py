"""`sar.check_model`: whether several workers compute what one process computes, and if not, which module differs first.

[Note: two runs]
Each worker reads the same sample of the graph and runs the model on it alone. Then all workers run it together, each on
its share. Both runs are in float64 if the model allows it, so that differences are no rounding errors, and without
dropout, because workers draw other numbers than one process. What modules return is compared by sums of powers over all
rows, which depend neither on the order of rows nor on the number of calls: one for each tile of messages. Runs that
differ are repeated with hooks on all modules; not the first ones, as layers may take a slower path if there are hooks.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sar.adapters.dgl.load import load_dgl_partition_data, on_device
from sar.comm import session
from sar.comm.collectives import all_max, all_sum
from sar.comm.rows import BufferPool
from sar.common_tuples import EID, NID, NTYPE, PartitionData, ShardEdgesAndFeatures, StrPath
from sar.core.regroup import deal_parts, regroup, runs_of
from sar.errors import ConfigError, PeerError
from sar.outofcore.workers import run_in_turns
from sar.storage.partition_json import read_partition_json
from sar.train.counted_graph import CountingGroup

_CPU: Final = torch.device("cpu")
_DROPOUT: Final = re.compile("(feature_)?(alpha_)?dropout([123]d|_)?")

Results = dict[tuple[str, str], Tensor]
"""By module or parameter: the power sums of its "input" and "output", in order of execution, "loss" and "gradient"."""
LossOf = Callable[[nn.Module, PartitionData], Tensor]


def check_model(model: nn.Module, loss_of: LossOf, directory: StrPath, *, nodes: int = 10_000) -> str:
    """Compare outputs, loss and gradients of all workers with those of one process; a collective call.

    Finds code that takes the rows of one worker for all rows, such as `x.mean(0)`, `BatchNorm1d` or a loss divided by
    the local count. A single worker is compared to two workers of its process. Computes in float64 and without dropout,
    on copies of the model, and leaves torch's random state as it is.

    Args:
        model: alike on all workers, in training or evaluation mode.
        loss_of: called as `loss_of(model, data)` with a worker's partition. Makes the graph and returns the loss as the
            training script does, before its backward. Features and labels must come from `data`.
        directory: the partition directory, or its JSON file.
        nodes: about how many nodes to check. In a larger graph they are every k-th of each type, and in-edges from
            others begin at the nearest of them. Memory: the model on these nodes, and a partition while it is read.

    Returns:
        What was compared, as a sentence.

    Raises:
        ConfigError: on all workers, if something differs or there is no gradient to compare. Names the first module
            that differs, and the likely cause.
        PeerError: if `loss_of` raised on another worker.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel) or "_orig_mod" in model._modules:  # torch.compile
        model = next(model.children())
    with session.current_group().guard() as group:
        workers = max(group.world_size, 2)
        check = _Check(model, loss_of, *_read_sample(directory, nodes, workers))
        if group.world_size > 1:
            equal, text = check.compare(group.rank)
        else:
            threads = run_in_turns(workers, check.compare, None)
            for error in sorted(threads.failures.values(), key=lambda error: isinstance(error, PeerError)):
                raise error
            equal, text = threads.results[0]
    if not equal:
        raise ConfigError(text)
    return text


class _Check:
    """Runs a model on a sample, on one process and on all workers; see [Note: two runs]."""

    def __init__(self, model: nn.Module, loss_of: LossOf, sample: PartitionData, ranges: list[tuple[int, int]]) -> None:
        self.model, self.loss_of, self.sample, self.ranges = model, loss_of, sample, ranges
        self.double, alone = True, None
        with suppress(Exception):  # such as of code that makes float32 tensors
            alone = self.run()
        self.double = not all_max(alone is None)
        self.alone = alone if alone is not None and self.double else self.run()

    def run(self, rank: int | None = None, *, traced: bool = False, seed: int = 0) -> Results:
        """Run a copy of the model, forward and backward, as one of the workers, or on one process with all nodes."""
        model, data = deepcopy((self.model, self.sample))
        model.zero_grad()
        for module in model.modules():
            rate = "p" if isinstance(module, _DropoutNd) else "dropout"  # some layers read it
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
        if self.double:
            model.double()
            for features in (data.node_features, data.all_shard_edges[0].edge_features):
                features.update({name: x.double() for name, x in features.items() if x.is_floating_point()})
        found: Results = {}

        def note(event: tuple[str, str], _: nn.Module, *values: Any) -> None:
            for x in tree_leaves(values if event[1] == "input" else values[1]):
                if isinstance(x, Tensor) and x.is_floating_point():
                    found[event] = _power_sums(x) + found.get(event, 0)

        for name, module in model.named_modules() if traced else [("", model)]:
            module.register_forward_pre_hook(partial(note, (name, "input")), with_kwargs=True)
            module.register_forward_hook(partial(note, (name, "output")))
        device, default = next((p.device for p in model.parameters()), _CPU), torch.get_default_dtype()
        group = session.standing_in(CountingGroup(0, 1), BufferPool(_CPU)) if rank is None else nullcontext()
        random = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with group, random, torch.enable_grad(), _DropoutOff():
            torch.manual_seed(seed)
            torch.set_default_dtype(torch.float64 if self.double else default)
            try:
                share = data if rank is None else regroup({0: data}, self.ranges, rank)
                loss = self.loss_of(model, on_device(share, device))
                results = dict(found)  # as the backward may call modules again
                if all_max(not isinstance(loss, Tensor) or not loss.requires_grad):
                    raise ConfigError("loss_of has to return a loss with a gradient, on every worker.")
                loss.backward()
            finally:
                torch.set_default_dtype(default)
        results["", "loss"] = loss.detach()
        for name, p in model.named_parameters():
            results[name, "gradient"] = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        return results

    def compare(self, rank: int) -> tuple[bool, str]:
        """Run with all workers, and tell what is equal, or what differs and why; the same text on all workers."""
        alone, workers, tolerance = self.alone, len(self.ranges), 1e-6 if self.double else 1e-3
        low, high = -all_max(-alone["", "loss"]), all_max(alone["", "loss"])
        gradients = any(x.any() for (_, what), x in alone.items() if what == "gradient")
        if not (gradients and high - low <= tolerance * abs(high)):  # or one is NaN
            found = f"the workers' losses are {low:.6g} to {high:.6g}" if gradients else "no parameter has a gradient"
            return (
                False,
                f"If each worker has all nodes, {found}. Expected that of loss_of(model, ...) after sync_params.",
            )
        own = self.run(rank)
        wrong = [event for event in _differing(alone, own, workers, tolerance) if event[1] != "input"]
        results = ", ".join(dict.fromkeys(what for _, what in wrong or alone if what != "input"))
        runs = f"on {workers} workers and on one process, for {self.ranges[-1][1]} nodes in {high.dtype}"
        if not wrong:
            return True, f"Equal {runs}: {results} ({high:.6g})."
        loss = all_sum(own["", "loss"])
        alone, again, own = self.run(traced=True), self.run(traced=True, seed=1), self.run(rank, traced=True)
        name, what = event = next(iter(_differing(alone, own, workers, tolerance / 1e3)), wrong[0])
        module = type(self.model.get_submodule(name if what in ("input", "output") else "")).__name__
        if what == "loss":
            cause = (
                "a worker's loss has to be the sum over its nodes, divided by the number on all workers: sar.Task.loss"
            )
        elif what == "gradient":
            cause = "outputs and loss do not, so a worker detaches something"
        elif event in _differing(alone, again, 1, tolerance):
            cause = "it depends on random numbers, of which only dropout is off in a check"
        elif what == "output" and "Norm" in module:
            cause = "it normalises by the rows of one worker: sar.convert_batchnorm, or sar.pyg.convert_norms"
        else:
            place = "before" if what == "input" else "in"
            cause = f"code {place} it takes one worker's rows for all, as in x.mean(0), or reorders them: sar.all_sum"
        return False, (
            f"Different {runs}: {results} (losses {loss:.6g} and {high:.6g}). The first to differ is the {what} of "
            f"{name or 'the model'} ({module}): {cause}."
        )


def _differing(one: Results, other: Results, workers: int, tolerance: float) -> list[tuple[str, str]]:
    """The results of one process that are not the sums of the others over workers."""
    totals = [other.get(event, torch.zeros_like(x)) for event, x in one.items()]
    differing, largest = [], max(x.norm() for (_, what), x in one.items() if what == "gradient")
    for (event, x), total in zip(one.items(), all_sum(totals) if workers > 1 else totals, strict=True):
        if event[1] in ("input", "output"):  # of all rows, or of what each worker has, such as a graph's embedding
            allowed = tolerance * x[1] + tolerance**2 * x[1, 0]
            same = any(((total - n * x).abs() <= n * allowed).all() for n in (1, workers))
        else:
            same = (total - x).norm() <= tolerance * x.norm() + tolerance**2 * largest  # which NaN is not
        if not same:
            differing.append(event)
    return differing


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


def _read_sample(directory: StrPath, nodes: int, workers: int) -> tuple[PartitionData, list[tuple[int, int]]]:
    """Read about so many nodes as one partition, with the range of node IDs that each worker gets."""
    spec = read_partition_json(directory)
    starts, ends = torch.from_numpy(spec.node_ranges.copy()).unbind(2)  # (P, T)
    step = max(1, -(-int(ends.max()) // nodes))
    pieces = 1 if spec.num_parts >= workers else workers  # of each type in each partition
    cuts = starts[..., None] + (ends - starts)[..., None] * torch.arange(pieces + 1) // pieces
    sizes = (cuts.diff() + step - 1).mT // step  # (P, pieces, T)
    first = (sizes.flatten().cumsum(0).view_as(sizes) - sizes).mT.flatten()
    starts, ends = (bound.flatten().contiguous() for bound in (cuts[..., :-1], cuts[..., 1:]))

    def renumber(ids: Tensor) -> tuple[Tensor, Tensor]:
        """The new IDs of nodes, or of the nearest sampled ones before them, and which of them are sampled."""
        run = torch.searchsorted(ends, ids, right=True)
        place = ids - starts[run]
        return first[run] + place // step, place % step == 0

    def take(features: dict[str, Tensor], types: Sequence[str], kept: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """The sampled rows of features of one type, and `rows` of features of all types."""
        of_type = {name: kept[features[NTYPE] == kind] for kind, name in enumerate(types)}
        return {key: x[of_type.get(key.partition("/")[0], rows)] for key, x in features.items()}

    parts, runs, bounds = {}, runs_of(sizes.sum(2).flatten().tolist()), runs_of(sizes.sum((1, 2)).tolist())
    for part in range(spec.num_parts):
        with session.standing_in(CountingGroup(part, spec.num_parts), BufferPool(_CPU)):
            data = load_dgl_partition_data(spec.path, part, _CPU)
        etypes, shards = [":".join(etype) for etype in data.edge_type_names], []
        for (src, dst), features in data.all_shard_edges:
            new, kept = renumber(dst)
            features = take(features, etypes if len(etypes) > 1 else (), kept, kept)
            shards.append(ShardEdgesAndFeatures((renumber(src)[0][kept], new[kept]), features))
        new, kept = renumber(torch.arange(*data.node_ranges[part]))
        rows = kept.nonzero().squeeze(1)[new[kept].argsort()]
        features = take(data.node_features, data.node_type_names, kept, rows)
        parts[part] = PartitionData(shards, bounds, features, data.node_type_names, data.edge_type_names)
    whole = regroup(parts, [(0, runs[-1][1])], 0)
    whole.node_features[NID] = torch.arange(runs[-1][1])
    edges = whole.all_shard_edges[0].edge_features
    edges[EID] = edges[EID].argsort().argsort()  # without gaps
    shares = deal_parts([end - start for start, end in runs], workers)
    return whole, [(runs[share[0]][0], runs[share[-1]][1]) for share in shares]
