"""`sar.check_model`: whether several workers compute what one process computes, and if not, which module differs first.

[Note: two runs]
Each worker reads the same sample of the graph and runs the model on it alone; then all run it together, each with its
share. Both are in float64 if the model allows it, so that no difference is a rounding error, and without dropout, since
workers draw other numbers than one process. What modules return is compared by sums of powers over all rows: these do
not depend on the order of rows, nor on the number of calls, such as one for each tile of messages. Only if the runs
differ do they get hooks on all modules, around which layers may take a slower path than in training.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
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
from sar.comm.collectives import all_max, all_sum, sync_params
from sar.comm.rows import BufferPool
from sar.common_tuples import EID, NTYPE, PartitionData, ShardEdgesAndFeatures, StrPath
from sar.core.regroup import regroup, runs_of
from sar.errors import ConfigError, PeerError
from sar.outofcore.workers import run_in_turns
from sar.storage.part_files import types_of
from sar.storage.partition_json import read_partition_json
from sar.train.counted_graph import CountingGroup

_DROPOUT: Final = re.compile("(feature_)?(alpha_)?dropout([123]d|_)?")

LossOf = Callable[[nn.Module, PartitionData], Tensor]
Results = dict[tuple[str, str], Tensor]  # by module and "input" or "output": power sums; and "loss", and "gradient"


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
        ConfigError: on all workers, if something differs or there is nothing to compare. Names the first module that
            differs, and the likely cause.
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
            if threads.failures:
                raise min(threads.failures.values(), key=lambda error: isinstance(error, PeerError))
            equal, text = threads.results[0]
    if not equal:
        raise ConfigError(text)
    return text


class _Check:
    """Runs a model on a sample, on one process and on all workers; see [Note: two runs]."""

    def __init__(self, model: nn.Module, loss_of: LossOf, sample: PartitionData, ranges: list[tuple[int, int]]) -> None:
        self.model, self.loss_of, self.sample, self.ranges = deepcopy(model), loss_of, sample, ranges
        sync_params(self.model)  # those of worker 0, as at the beginning of training
        self.dtype, self.tolerance = torch.float64, 1e-6
        try:
            self.alone = self.run()
        except Exception:  # such as of code that makes float32 tensors
            self.dtype, self.tolerance = torch.float32, 1e-3
            self.alone = self.run()

    def run(self, rank: int | None = None, *, traced: bool = False, seed: int = 0) -> Results:
        """Run a copy of the model, forward and backward, as one of the workers, or on one process with all nodes."""
        model, data = deepcopy((self.model, self.sample))
        model.to(self.dtype).zero_grad()
        for module in model.modules():
            rate = "p" if isinstance(module, _DropoutNd) else "dropout"  # some layers read it
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
        for features in (data.node_features, data.all_shard_edges[0].edge_features):
            features.update({name: x.to(self.dtype) for name, x in features.items() if x.is_floating_point()})
        data = data if rank is None else regroup({0: data}, self.ranges, rank)
        found: Results = {}

        def note(event: tuple[str, str], _: nn.Module, *values: Any) -> None:
            for x in tree_leaves(values if event[1] == "input" else values[1]):
                if isinstance(x, Tensor) and x.is_floating_point():
                    found[event] = _power_sums(x) + found.get(event, 0)

        for name, module in model.named_modules() if traced else [("", model)]:
            module.register_forward_pre_hook(partial(note, (name, "input")), with_kwargs=True)
            module.register_forward_hook(partial(note, (name, "output")))
        cpu, default = torch.device("cpu"), torch.get_default_dtype()
        group = session.standing_in(CountingGroup(0, 1), BufferPool(cpu)) if rank is None else nullcontext()
        with group, torch.random.fork_rng(), torch.enable_grad(), _DropoutOff():
            torch.manual_seed(seed)
            torch.set_default_dtype(self.dtype)
            try:
                loss = self.loss_of(model, on_device(data, next((p.device for p in model.parameters()), cpu)))
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
        workers, own = len(self.ranges), self.run(rank)
        wrong = [event for event in _differing(self.alone, own, workers, self.tolerance) if event[1] != "input"]
        results = ", ".join(dict.fromkeys(what for _, what in wrong or self.alone if what != "input"))
        losses = f"the loss is {all_sum(own['', 'loss']):.6g}, on one process {self.alone['', 'loss']:.6g}"
        runs = f"{results} on {workers} workers and one process ({self.ranges[-1][1]} nodes, {self.dtype}); {losses}"
        if not wrong:
            return True, f"Equal {runs}."
        alone, again, own = self.run(traced=True), self.run(traced=True, seed=1), self.run(rank, traced=True)
        name, what = event = next(iter(_differing(alone, own, workers, self.tolerance / 1e3)), wrong[0])
        module = type(self.model.get_submodule(name if what in ("input", "output") else "")).__name__
        if what == "loss":
            cause = "a worker's loss has to be the sum over its nodes, divided by the number on all: use sar.Task.loss"
        elif what == "gradient":
            cause = "it is lost on a worker, or on all; is something detached, or is it the loss of another model?"
        elif event in _differing(alone, again, 1, self.tolerance):
            cause = "it depends on random numbers, of which only dropout is off in a check"
        elif what == "output" and "Norm" in module:
            cause = "it normalises by the rows of one worker; call sar.convert_batchnorm or sar.pyg.convert_norms"
        else:
            place = "before" if what == "input" else "in"
            cause = f"code {place} it takes a worker's rows for all, as in x.mean(0), or reorders them; use sar.all_sum"
        return False, f"Different {runs}. First differs the {what} of {name or 'the model'} ({module}): {cause}."


def _differing(one: Results, other: Results, workers: int, tolerance: float) -> list[tuple[str, str]]:
    """The results of one process that are not the sums of the others over workers."""
    totals = [other.get(event, torch.zeros_like(x)) for event, x in one.items()]
    differing, largest = [], max((x.norm() for (_, what), x in one.items() if what == "gradient"), default=0.0)
    for (event, x), total in zip(one.items(), all_sum(totals) if workers > 1 else totals, strict=True):
        if event[1] in ("input", "output"):  # of all rows, or of what each worker has, such as a graph's embedding
            allowed = tolerance * x[1] + tolerance**2 * x[1, 0]
            same = any(((total - n * x).abs() <= n * allowed).all() for n in (1, workers))
        else:  # which is nothing to compare if it is NaN, or all gradients are 0
            same = largest > 0 and (total - x).norm() <= tolerance * x.norm() + tolerance**2 * largest
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
    return torch.stack([(y**k).sum() for y in (x, x.abs()) for k in powers]).view(2, 5)


def _read_sample(directory: StrPath, nodes: int, workers: int) -> tuple[PartitionData, list[tuple[int, int]]]:
    """Read about so many nodes as one partition, and the node IDs of each worker, which gets as many of each type."""
    spec = read_partition_json(directory)
    step = max(1, -(-int(spec.node_ranges.max()) // nodes))
    ids = torch.cat([torch.arange(start, end, step) for start, end in spec.node_ranges.reshape(-1, 2).tolist()])
    kinds, ends = types_of(ids, spec.node_ranges).long(), torch.tensor(spec.partition_ranges)[:, 1]
    seen = (kinds[:, None] == torch.arange(len(spec.node_types))).cumsum(0)  # of each type so far
    worker = (seen.gather(1, kinds[:, None]).squeeze(1) - 1) * workers // seen[-1][kinds]
    order = (worker * len(spec.node_types) + kinds).argsort(stable=True)
    new_ids = order.argsort()

    def find(nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest sampled node at or before each node, and which nodes are sampled."""
        place = torch.searchsorted(ids, nodes, right=True) - 1
        return place, ids[place] == nodes

    def take(features: dict[str, Tensor], types: list[str], kept: Tensor) -> dict[str, Tensor]:
        """The sampled rows of features of all types and of one type."""
        rows = {name: kept[features[NTYPE] == kind] for kind, name in enumerate(types)}
        return {key: x[rows.get(key.partition("/")[0], kept)] for key, x in features.items()}

    parts, bounds = {}, runs_of(torch.searchsorted(ends, ids, right=True).bincount(minlength=spec.num_parts).tolist())
    for part, owned in enumerate(spec.partition_ranges):
        with session.standing_in(CountingGroup(part, spec.num_parts), BufferPool(torch.device("cpu"))):
            data = load_dgl_partition_data(spec.path, part, "cpu")
        etypes, shards = [":".join(etype) for etype in data.edge_type_names], []
        for (src, dst), features in data.all_shard_edges:
            place, kept = find(dst)
            features = take(features, etypes if len(etypes) > 1 else [], kept)
            shards.append(ShardEdgesAndFeatures((find(src)[0][kept], place[kept]), features))
        features = take(data.node_features, data.node_type_names, find(torch.arange(*owned))[1])
        parts[part] = PartitionData(shards, bounds, features, data.node_type_names, data.edge_type_names)
    whole = regroup(parts, [(0, len(ids))], 0)
    [((src, dst), features)] = whole.all_shard_edges
    features[EID] = features[EID].argsort().argsort()  # without gaps
    shards = [ShardEdgesAndFeatures((new_ids[src], new_ids[dst]), features)]
    nodes_of_all = {key: x if "/" in key else x[order] for key, x in whole.node_features.items()}
    whole = whole._replace(all_shard_edges=shards, node_features=nodes_of_all)
    return whole, runs_of(worker.bincount(minlength=workers).tolist())
