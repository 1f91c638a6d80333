"""`sar.check_loss`: the losses of workers beside that of one, for scripts that are right and that are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sar
from sar.cli.demo import community_graph
from sar.errors import ConfigError
from sar.nn.plain_layers import SAGEConv
from sar.partition.in_memory import divide
from tests.core.attempts import catch_and_recover

RIGHT = ("right", "batch norm over all")
WRONG = ("a mean of each worker", "centered by own nodes", "batch norm of each worker")


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(6, 8), SAGEConv(8, 4)
        self.norm: nn.Module = nn.BatchNorm1d(8) if "batch norm" in how else nn.Identity()
        self.center = how == "centered by own nodes"

    def forward(self, graph, x):
        x = x - x.mean(0) if self.center else x
        return self.last(graph, self.norm(self.first(graph, x)).relu())


def check(folder: str, how: str):
    """What `check_loss` returns or raises, and what it changes."""
    sar.seed(0)
    model = Model(how)
    model = sar.convert_batchnorm(model) if how == "batch norm over all" else model
    sar.sync_params(model)

    def loss_of(model, data):
        graph, task = sar.construct_full_graph(data), sar.Task.of(data)
        logits = model(graph, data["feat"])
        if how == "a mean of each worker":
            return functional.cross_entropy(logits[task.masks["train"]], task.labels[task.masks["train"]])
        return task.loss(logits, "train")

    before = {name: value.clone() for name, value in model.state_dict().items()} | {"draws": torch.get_rng_state()}
    try:
        found: object = sar.check_loss(model, loss_of, folder)
    except ConfigError as error:
        found = str(error)
    after = model.state_dict() | {"draws": torch.get_rng_state()}
    data = sar.load_dgl_partition_data(folder, sar.rank(), "cpu")
    return found, all(torch.equal(after[name], value) for name, value in before.items()), sar.all_sum(len(data["feat"]))


@pytest.mark.parametrize("world_size", [2])
def test_check_loss(pool, world_size, tmp_path):
    graph = community_graph(200, 1200, num_features=6, num_classes=4).with_split().with_self_loops()
    graph.node_data["feat"][:] += graph.node_data["label"][:, None]  # parts have different means
    folder = str(divide(graph, tmp_path, "graph", 2).json_file)
    for how in (*RIGHT, *WRONG):
        found, unchanged, nodes = zip(*pool.run(check, folder, how), strict=True)
        assert all(unchanged), how
        assert nodes == (200,) * world_size  # the group goes on
        assert len(set(found)) == 1
        if how in RIGHT:
            assert 0.5 < found[0] < 5
        else:
            assert f"{world_size} workers add up to" in found[0], how


def fail_on_the_whole_graph(folder: str):
    """What a worker raises where the loss of the whole graph cannot be computed."""

    def loss_of(model, data):
        if sar.world_size() == 1:
            raise ValueError("too large for one worker")
        return model(data["feat"]).sum()

    failure = catch_and_recover(sar.check_loss, nn.Linear(6, 1), loss_of, folder)
    return failure, sar.all_sum(1)


@pytest.mark.parametrize("world_size", [2])
def test_an_error_on_the_whole_graph_reaches_everybody(pool, world_size, tmp_path):
    graph = community_graph(200, 1200, num_features=6, num_classes=4)
    folder = str(divide(graph, tmp_path, "graph", 2).json_file)
    for rank, (failure, workers) in enumerate(pool.run(fail_on_the_whole_graph, folder, timeout=30)):
        assert workers == world_size
        assert failure.kind == ("ValueError" if rank == 0 else "PeerError")
        assert "too large for one worker" in failure.message
