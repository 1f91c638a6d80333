"""`sar.check_model`: compares several workers with one process, and names the first module that differs.

[Note: two runs]
Each worker reads the same sample and runs the model on it; then all workers run it together, each with its share. Both
runs are in float64 if possible, so differences are not rounding errors, and without dropout, because workers draw
different numbers than one process. Modules are compared by sums of powers over all rows, which depend neither on the
order of rows nor on the number of calls (one per tile of messages). If the two runs differ, a second pair of runs adds
hooks to inner modules; they are not used at first because layers may take a slower path with hooks.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sar.adapters.dgl.load import load_dgl_partition_data
from sar.comm import session
from sar.comm.collectives import all_max, all_sum, sync_params
from sar.comm.group import Group
from sar.comm.replicas import refuse_sharded
from sar.comm.transport import Transport
from sar.common_tuples import NTYPE, PartitionData, ShardEdgesAndFeatures, StrPath
from sar.data.load import on_device
from sar.data.partition_json import read_partition_json
from sar.data.regroup import deal_parts, regroup, runs_of
from sar.errors import ConfigError
from sar.outofcore.workers import run_in_turns

Parts = dict[int, PartitionData]
LossOf = Callable[[nn.Module, PartitionData], Tensor]
Event = tuple[str, str, int]  # a module, "input", "output", "loss" or "gradient", and which tensor of several
Results = dict[Event, Tensor]  # power sums of inputs and outputs; losses and gradients unchanged


def check_model(model: nn.Module, loss_of: LossOf, directory: StrPath, *, nodes: int = 10_000) -> str:
    """Compare outputs, loss and gradients of the distributed model with one process. A collective call.

    Finds code that uses one worker's rows instead of all, such as `x.mean(0)`, `BatchNorm1d` or a loss divided by the
    local count. A single worker is compared with two workers in its process. Computes in float64 without dropout, on
    copies of the model with the parameters of worker 0, and does not change torch's random state.

    Args:
        model: in training or evaluation mode.
        loss_of: called as `loss_of(model, data)` with a worker's partition. Creates the graph and returns the loss as
            in the training script, before the backward. Features and labels must come from `data`.
        directory: the partition directory, or its JSON file.
        nodes: approximate number of nodes to check. In a larger graph, every k-th node of each type is checked, and
            edges from other nodes start at the nearest checked node. Needs memory for the model on these nodes, and for
            a partition while it is read. Default 10,000.

    Returns:
        A description of the result.

    Raises:
        ConfigError: on all workers, if anything differs. Names the first module that differs, and the likely cause.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel) or "_orig_mod" in model._modules:  # torch.compile
        model = next(model.children())
    with session.current_group().guard() as group:
        refuse_sharded(model, "check_model")
        workers = max(group.world_size, 2)
        check = _Check(model, loss_of, *_read_sample(directory, nodes, workers))
        if group.world_size > 1:
            equal, text = check.compare(group.rank)
        else:
            threads = run_in_turns(workers, check.compare, None)
            if (failure := threads.first_failure()) is not None:
                raise failure[1]
            equal, text = threads.results[0]
    if not equal:
        raise ConfigError(text)
    return text


class _Check:
    """Runs a model on a sample, on one process and on all workers; see [Note: two runs]."""

    def __init__(self, model: nn.Module, loss_of: LossOf, parts: Parts, ranges: list[tuple[int, int]]) -> None:
        self.model, self.loss_of, self.parts, self.ranges = deepcopy(model), loss_of, parts, ranges
        sync_params(self.model)  # as at the beginning of training
        self.dtype, self.tolerance = torch.float64, 1e-6
        try:
            self.alone = self.run()
        except Exception:  # for example because code creates float32 tensors
            self.dtype, self.tolerance = torch.float32, 1e-3
            self.alone = self.run()

    def run(self, rank: int | None = None, *, traced: bool = False, seed: int = 0) -> Results:
        """Run forward and backward of a copy of the model, as one of the workers or in one process with all nodes."""
        model, parts = deepcopy((self.model, self.parts))
        (model.double() if self.dtype == torch.float64 else model.float()).zero_grad()
        for module in model.modules():
            rate = "p" if isinstance(module, _DropoutNd) else "dropout"  # some layers read it
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
        data = regroup(parts, [(0, self.ranges[-1][1])] if rank is None else self.ranges, rank or 0)
        for features in (data.node_features, *(shard.edge_features for shard in data.all_shard_edges)):
            features.update({name: x.to(self.dtype) for name, x in features.items() if x.is_floating_point()})
        found: Results = {}

        def note(name: str, what: str, _: nn.Module, *values: Any) -> None:
            for i, x in enumerate(tree_leaves(values if what == "input" else values[1])):
                if isinstance(x, Tensor) and x.is_floating_point():
                    found[name, what, i] = _power_sums(x) + found.get((name, what, i), 0)

        for name, module in model.named_modules() if traced else [("", model)]:
            if name.endswith(("aggr_module", "leaky_relu", "attn_drop")):  # hooks on these disable fast paths
                continue
            module.register_forward_pre_hook(partial(note, name, "input"), with_kwargs=True)
            module.register_forward_hook(partial(note, name, "output"))
        cpu, default = torch.device("cpu"), torch.get_default_dtype()
        group = session.standing_in(Group(Transport(0, 1))) if rank is None else nullcontext()
        with group, torch.random.fork_rng(), torch.enable_grad(), _DropoutOff():
            torch.manual_seed(seed)
            torch.set_default_dtype(self.dtype)
            try:
                loss = self.loss_of(model, on_device(data, next((p.device for p in model.parameters()), cpu)))
                if all_max(not isinstance(loss, Tensor) or not loss.requires_grad):
                    raise ConfigError("loss_of has to return a loss with a gradient, on every worker.")
                results: Results = {**found, ("", "loss", 0): loss.detach()}  # the backward may call modules again
                loss.backward()
            finally:
                torch.set_default_dtype(default)
        for name, p in model.named_parameters():
            results[name, "gradient", 0] = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        return results

    def compare(self, rank: int) -> tuple[bool, str]:
        """Run with all workers, and report equality, or the difference and its cause; the same text on all workers."""
        workers, own = len(self.ranges), self.run(rank)
        wrong = [event for event in _differing(self.alone, own, workers, self.tolerance) if event[1] != "input"]
        results = ", ".join(dict.fromkeys(what for _, what, _ in wrong or self.alone if what != "input"))
        losses = f"losses {all_sum(own['', 'loss', 0]):.6g} and {self.alone['', 'loss', 0]:.6g}"
        found = f"{results} ({self.ranges[-1][1]} nodes, {self.dtype}, {losses})"
        if not wrong:
            return True, f"{workers} workers and one process agree on {found}."
        alone, again, own = self.run(traced=True), self.run(traced=True, seed=1), self.run(rank, traced=True)
        name, what, _ = event = next(iter(_differing(alone, own, workers, self.tolerance / 1e3)), wrong[0])
        module = type(self.model.get_submodule(name if what in ("input", "output") else "")).__name__
        if what == "loss":
            cause = "a worker's loss has to be the sum over its nodes, divided by the number on all: use sar.Task.loss"
        elif what == "gradient":
            cause = "something is detached, or loss_of does not call the model that it is given"
        elif event in _differing(alone, again, 1, self.tolerance):
            cause = "it depends on random numbers other than dropout, which is off in a check"
        elif what == "output" and "Norm" in module:
            cause = "it normalises by the rows of one worker; call sar.convert_batchnorm(model)"
        else:
            place = "before" if what == "input" else "in"
            cause = f"code {place} it uses one worker's rows, as x.mean(0), or reorders them; see sar.nn.global_mean"
        first = f"The first to differ is the {what} of {name or 'the model'} ({module}): {cause}."
        return False, f"{workers} workers and one process differ in {found}. {first}"


def _differing(one: Results, other: Results, workers: int, tolerance: float) -> list[Event]:
    """The results of one process that differ from the workers' sums; all gradients if the sums are 0."""
    totals = [other.get(event, torch.zeros_like(x)) for event, x in one.items()]
    wrong, largest = [], max((float(x.norm()) for (_, what, _), x in one.items() if what == "gradient"), default=0.0)
    for ((_, what, _), x), total in zip(one.items(), all_sum(totals) if workers > 1 else totals, strict=True):
        traced = what in ("input", "output")  # over all rows, or equal on all workers, such as a pooled graph
        scale = x[1] + tolerance * (x[1, 0] + 1) if traced else x.norm() + tolerance * largest
        same = [((total - n * x).abs() < n * tolerance * scale).all() for n in ((1, workers) if traced else (1,))]
        wrong.append(not any(same))  # NaN also counts as wrong
    return [e for e, bad in zip(one, all_max(torch.tensor(wrong)) if workers > 1 else wrong, strict=True) if bad]


class _DropoutOff(TorchFunctionMode):
    """Replaces functional dropout by the identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.fullmatch("(feature_)?(alpha_)?dropout([123]d|_)?", getattr(func, "__name__", "")):
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


def _power_sums(x: Tensor) -> Tensor:
    """Sums of x^k and |x|^k over all elements for k = 0 to 4, (2, 5); only k = 1 for scalars, which may be shares."""
    x = x.detach().double().nan_to_num(0, 0, 0).cpu()
    return torch.stack([(y ** (k if x.dim() else min(k, 1))).sum() for y in (x, x.abs()) for k in range(5)]).view(2, 5)


def _read_sample(directory: StrPath, nodes: int, workers: int) -> tuple[Parts, list[tuple[int, int]]]:
    """Read about `nodes` nodes of a directory by partition, and divide their new IDs among the workers."""
    spec = read_partition_json(directory)
    step = max(1, -(-int(spec.node_ranges.max()) // max(nodes, 1)))
    pieces = 1 if spec.num_parts >= workers else workers  # of a partition, with equal shares of each type
    runs = [
        torch.cat([torch.arange(start, end, step).tensor_split(pieces)[piece] for start, end in of_part])
        for of_part in spec.node_ranges.tolist()
        for piece in range(pieces)
    ]
    sampled, new_ids = torch.cat(runs).sort()
    counts = [len(run) for run in runs]
    bounds = runs_of([sum(counts[i : i + pieces]) for i in range(0, len(counts), pieces)])  # of partitions

    def find(ids: Tensor) -> tuple[Tensor, Tensor]:
        """By node: the new ID of the nearest sampled node up to it; and its own new ID, or -1 if it is not sampled."""
        place = torch.searchsorted(sampled, ids, right=True) - 1
        return new_ids[place], torch.where(sampled[place] == ids, new_ids[place], -1)

    parts = {}
    for part, owned in enumerate(spec.partition_ranges):
        with session.standing_in(Group(Transport(part, spec.num_parts))):
            data = load_dgl_partition_data(spec.path, part, "cpu")
        shards = [ShardEdgesAndFeatures((find(src)[0], find(dst)[1]), x) for (src, dst), x in data.all_shard_edges]
        new, kinds = find(torch.arange(*owned))[1], data.node_features[NTYPE]
        rows = {ntype: (new >= 0)[kinds == kind] for kind, ntype in enumerate(data.node_type_names)}
        order = new.argsort()[int((new < 0).sum()) :]
        features = {key: x[rows.get(key.partition("/")[0], order)] for key, x in data.node_features.items()}
        data = PartitionData(shards, bounds, features, data.node_type_names, data.edge_type_names)
        parts[part] = regroup({part: data}, bounds, part)  # without edges into -1
    return parts, runs_of([sum(counts[i] for i in share) for share in deal_parts(counts, workers)])
