"""`DistributedDataParallel` around a model: gradients of single-machine DGL with `ddp_sum_hook`, refused without."""

from contextlib import ExitStack
from functools import partial

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import sar
from sar.errors import ConfigError
from tests.core.attempts import fail_on_all_ranks
from tests.matrix import corner
from tests.parity.harness import check, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS

pytestmark = pytest.mark.processes("virtual workers refuse DistributedDataParallel")


class Model(nn.Module):
    """Built-in and Python messages, statistics of all nodes, and parameters that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first = dgl.nn.GATConv(6, 3, 2, residual=True, allow_zero_in_degree=True)
        self.norm = sar.DistributedBN1D(6) if dist.is_initialized() else nn.BatchNorm1d(6)
        self.message = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)

    def forward(self, graph, x, w):
        with graph.local_scope():
            graph.ndata["h"] = self.norm(self.first(graph, x).flatten(1))
            graph.edata["w"] = w
            graph.update_all(lambda edges: {"m": self.message(edges.src["h"]) * edges.data["w"]}, fn.mean("m", "out"))
            return graph.ndata["out"].tanh()


def trained_with_ddp(graph, data, mode_of_unused, bucket_mb):
    """Three steps of gradient descent from the parameters of worker 0."""
    torch.manual_seed(sar.rank() if dist.is_initialized() else 0)
    model = Model().to(data.nodes["x"].dtype)
    if mode_of_unused == "absent":
        del model.unused
    trained = model
    if dist.is_initialized():
        sar.patch_dgl()
        trained = DistributedDataParallel(
            model, find_unused_parameters=mode_of_unused == "found", bucket_cap_mb=bucket_mb
        )
        trained.register_comm_hook(None, sar.ddp_sum_hook)
        sar.sync_params(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        x, w = data.leaf("x"), data.leaf("w")
        optimizer.zero_grad()
        out = trained(graph, x, w)
        weighted_sum(out, data.nodes["cotangent"]).backward()
        optimizer.step()
    results = {"node output": out, "node x.grad": x.grad, "edge w.grad": w.grad}
    results |= {f"same {name}": value for name, value in model.state_dict().items() if "num_batches" not in name}
    return results | {f"same {name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode_of_unused, bucket_mb", [("absent", 25), ("absent", 1e-4), ("found", 25)])
@pytest.mark.parametrize("scenario", ["isolated", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [2])
def test_gradients_are_those_of_the_whole_graph(pool, world_size, scenario, mode_of_unused, bucket_mb):
    parts = SCENARIOS[scenario](world_size)
    assert len(set(parts.node_counts)) > 1, "an average over workers would be something else"
    check(pool, parts, random_data(parts, torch.float64), [(trained_with_ddp, (mode_of_unused, bucket_mb))])


class InParts(nn.Module):
    """A layer, a distributed one and a layer, of which DDP wraps some by themselves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.conv = dgl.nn.SAGEConv(5, 4, "mean")
        self.last = nn.Linear(4, 3)
        self.double()


def one_of_its_own():
    return [dist.new_group([rank]) for rank in range(sar.world_size())][sar.rank()]


def trained_in_parts(graph, data, wrapped, hook, summed, context="sum", detached=False):
    """The gradients of a backward; DDP wraps some parts, and `gather_grads` gets some."""
    model = InParts()
    parts, x = dict(model.named_children()), data.nodes["x"]
    alone = not dist.is_initialized()
    for name in [] if alone else wrapped:
        group = one_of_its_own() if context == "group of one" else None
        parts[name] = DistributedDataParallel(parts[name], process_group=group)
        if hook is not None:
            parts[name].register_comm_hook(None, hook)
    with ExitStack() as stack:
        if context == "no_sync" and not alone:
            for name in wrapped:
                stack.enter_context(parts[name].no_sync())
        h = parts["conv"](graph, parts["first"](x).tanh())
        out = parts["last"](h.detach() if detached else h)
        if detached:  # then the loss alone is of the graph
            task = sar.Task(torch.zeros(len(x), dtype=torch.int64), {"train": torch.ones(len(x), dtype=torch.bool)})
            task.loss(out).backward()
        else:
            weighted_sum(out, x[:, :3]).backward()
    if not alone:
        given = dict(model.named_children()) if context == "bare" else parts
        sar.gather_grads(nn.ModuleDict({name: given[name] for name in summed}))
    return {f"same {name}.grad": p.grad for name, p in model.named_parameters()}


def own_hook(state, bucket):
    return sar.ddp_sum_hook(state, bucket)


ALL = ["first", "conv", "last"]


@pytest.mark.parametrize(
    "wrapped, hook, summed, context",
    [
        (["last"], sar.ddp_sum_hook, ["first", "conv"], "sum"),
        (["first", "last"], own_hook, ["conv"], "sum"),
        (ALL, sar.ddp_sum_hook, [], "sum"),
        (["last"], None, ALL, "no_sync"),
        (["last"], None, ALL, "group of one"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_parts_of_a_model(pool, world_size, wrapped, hook, summed, context):
    parts = SCENARIOS["first worker without nodes"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(trained_in_parts, (wrapped, hook, summed, context))])


@pytest.mark.parametrize(
    "wrapped, hook, summed, detached, word",
    [
        (["last"], None, ["first", "conv"], False, "averages"),
        (["last"], None, [], False, "averages"),
        (["first"], None, ["conv", "last"], False, "averages"),
        (ALL, None, [], False, "averages"),
        (["last"], default_hooks.allreduce_hook, ["first", "conv"], False, "averages"),
        (["last"], None, ["first"], True, "averages"),
        (["last"], sar.ddp_sum_hook, ALL, False, "Leave"),
        (ALL, sar.ddp_sum_hook, ALL, False, "Leave"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_parts_that_are_averaged_or_summed_twice(pool, world_size, wrapped, hook, summed, detached, word):
    parts = SCENARIOS["random"](world_size)
    for failure in fail_on_all_ranks(pool, parts, trained_in_parts, wrapped, hook, summed, "bare", detached):
        assert failure.kind == "ConfigError", failure
        assert word in failure.message, failure.message
        assert "register_comm_hook" in failure.message


def trained_beside(graph, data):
    """A model of torch's that has nothing to do with the graph, between two that have; each row counts the same."""
    found = trained_in_parts(graph, data, [], None, ALL)
    beside = nn.Linear(3, 1).double()
    wrapped = DistributedDataParallel(beside) if dist.is_initialized() else beside
    wrapped(torch.arange(3.0).double()).sum().backward()
    again = trained_in_parts(graph, data, [], None, ALL)
    return found | {f"{name} again": grad for name, grad in again.items()} | {"same beside": beside.weight.grad}


@pytest.mark.parametrize("world_size", [2])
def test_ddp_for_another_purpose_averages(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(trained_beside, ())])


class Sequence(nn.ModuleDict):
    def forward(self, graph, x):
        return self["conv"](graph, self["first"](x))


def shard(model, kind):
    if kind == "FSDP1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "replicate":
        return replicate(model)
    for module in (model["conv"], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (sar.world_size(),)))
    return model


def trained_in_shards(graph, data, kind, sums, loss):
    """The gradients of a step; the model is run by parts, as a module that is called."""
    torch.manual_seed(0)
    model = Sequence({"first": nn.Linear(6, 5), "conv": dgl.nn.SAGEConv(5, 4, "mean")}).to(data.nodes["x"].dtype)
    if dist.is_initialized():
        sar.patch_dgl()
        model = shard(model, kind)
        sar.Config.check_replicas = not sums
        if sums and kind == "replicate":
            model.register_comm_hook(None, sar.ddp_sum_hook)
        for module in model.modules() if sums and kind == "fully_shard" else ():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    out = model(graph, data.nodes["x"])
    if loss == "task":  # then the model makes no distributed call in the backward
        everyone = torch.ones(len(out), dtype=torch.bool)
        sar.Task(torch.zeros(len(out), dtype=torch.int64), {"train": everyone}).loss(out).backward()
    else:
        weighted_sum(out, data.nodes["cotangent"]).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return {f"same {n}.grad": getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
@pytest.mark.parametrize("world_size", [2])
def test_shards_are_summed(pool, world_size, kind):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(trained_in_shards, (kind, True, "sum"))], (1,))


@pytest.mark.parametrize(
    "kind, loss, words",
    [
        ("fully_shard", "sum", "optimizer.step(): a parameter is a DTensor"),
        ("replicate", "sum", "sar.ddp_sum_hook"),
        ("FSDP1", "task", "sar.ddp_sum_hook"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_shards_that_are_averaged(pool, world_size, kind, loss, words):
    for failure in fail_on_all_ranks(pool, SCENARIOS["random"](world_size), trained_in_shards, kind, False, loss):
        assert failure.kind == "ConfigError", failure
        assert words in failure.message


def given_shards():
    """Every call that takes a model, with one of each kind, and optimizers whose state is in shards."""
    for kind in ("fully_shard", "FSDP1"):
        model = shard(Sequence({"conv": nn.Linear(2, 2)}), kind)
        calls = [sar.sync_params, sar.gather_grads, partial(sar.check_model, loss_of=None, directory="none")]
        calls += [partial(sar.save_model, "none"), lambda model: sar.save_checkpoint("none", model=model)]
        for call in (*calls, lambda model: sar.load_checkpoint("none", model=model)):
            with pytest.raises(ConfigError, match="fully_shard"):
                call(model)
            sar.recover()
    zero = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.Adam)
    for call in (sar.save_checkpoint, sar.load_checkpoint):
        with pytest.raises(ConfigError, match="consolidate_state_dict"):
            call("none", optimizer=zero)
        sar.recover()


@pytest.mark.parametrize("world_size", [2, corner(1)])
def test_models_in_shards_are_refused(pool, world_size):
    pool.run(given_shards)
