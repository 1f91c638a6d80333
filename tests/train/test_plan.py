"""What `sar plan` predicts, against what the engine counts and the kernel measures."""

import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sar
from sar.adapters.dgl.shim import require_dgl
from sar.cli.demo.community_graph import community_graph
from sar.errors import ConfigError
from sar.host.memory import PeakMemory
from sar.host.processes import run_workers
from sar.partition.graph_data import GraphData
from sar.partition.in_memory import partition_graph
from sar.partition.inspect.inspection import inspect_directory
from sar.train.model_shape import ModelShape
from sar.train.plan import plan_training
from tests.partition.test_write import small_types
from tests.workers import REPOSITORY

KINDS = ("sage", "gcn", "gat")


class Model(nn.Module):
    """The layers that a `ModelShape` stands for."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        conv, self.layers = require_dgl().nn, nn.ModuleList()
        for k, (i, o) in enumerate(shape.layers):
            heads = 1 if k == len(shape.layers) - 1 else shape.heads
            self.layers.append(
                {
                    "sage": lambda i, o, heads: conv.SAGEConv(i, o, "mean"),
                    "gcn": lambda i, o, heads: conv.GraphConv(i, o),
                    "gat": lambda i, o, heads: conv.GATConv(i, o // heads, heads),
                }[shape.kind](i, o, heads)
            )

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(graph, x).flatten(1))
        return self.layers[-1](graph, x).flatten(1)


def train(json_file: str, shape: ModelShape, epochs: int) -> tuple[list[int], int, int]:
    """Bytes sent in each epoch, resident bytes before the first one, and the rise of the peak above that."""
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(json_file, sar.rank(), "cpu")
    x, labels, mask = (data.node_features[f"_N/{name}"] for name in ("feat", "label", "train_mask"))
    mask, graph = mask.bool(), sar.construct_full_graph(data)
    del data
    model = Model(shape)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters())
    memory, sent = PeakMemory(), []
    for _ in range(epochs):
        before = sar.comm.statistics()
        loss = functional.cross_entropy(model(graph, x)[mask], labels[mask], reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        sent.append((sar.comm.statistics() - before).bytes_sent)
    sar.unpatch_dgl()
    return sent, memory.start, memory.rise()


def bytes_sent(json_file: str, shapes: list[ModelShape], settings: dict[str, Any]) -> list[int]:
    """In one epoch of each model."""
    for name, value in settings.items():
        setattr(sar.Config, name, value)
    return [train(json_file, shape, 1)[0][0] for shape in shapes]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Partitions of a small graph by number of parts, made when asked for."""
    graph = community_graph(500, 4000, num_features=7, num_classes=5).with_split().with_self_loops()
    made: dict[int, Path] = {}

    def of(parts: int) -> Path:
        if parts not in made:
            made[parts] = partition_graph(graph, tmp_path_factory.mktemp("parts"), "small", parts).json_file
        return made[parts]

    return of


@pytest.mark.parametrize(
    "settings, widths",
    [
        ({}, [(7, 12, 12, 5), (7, 4, 5)]),  # the second is multiplied before it travels
        ({"comm_buffer_bytes": 4000}, [(7, 12, 12, 5)]),
        ({"disable_sr": True}, [(7, 12, 12, 5)]),
        ({"wire_dtype_features": torch.bfloat16}, [(7, 12, 12, 5)]),
    ],
    ids=["defaults", "small tiles", "mode 2", "bfloat16"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_predicted_to_the_byte(pool, world_size, directory, settings, widths, monkeypatch) -> None:
    for name, value in settings.items():
        monkeypatch.setattr(sar.Config, name, value)
    report = inspect_directory(directory(world_size))
    shapes = [ModelShape(kind, chosen, heads=2) for kind in KINDS for chosen in widths]
    plans = [plan_training(report, shape) for shape in shapes]
    found = pool.run(bytes_sent, str(directory(world_size)), shapes, settings)
    assert found == [[plan.workers[rank].traffic.sent for plan in plans] for rank in range(world_size)]


def test_one_worker_sends_nothing(directory) -> None:
    [worker] = plan_training(inspect_directory(directory(1)), ModelShape("gat", (7, 8, 5), 2)).workers
    assert worker.traffic.sent == 0
    assert worker.memory.buffers == 0


def random_graph(num_nodes: int, num_edges: int, num_features: int) -> GraphData:
    rng = np.random.default_rng(0)
    fields = {
        "feat": rng.standard_normal((num_nodes, num_features), dtype=np.float32),
        "label": rng.integers(16, size=num_nodes),
    }
    src, dst = rng.integers(0, num_nodes, (2, num_edges))
    return GraphData(src, dst, num_nodes, fields).with_self_loops().with_split()


def train_in_process(_: Any, json_file: str, shape: ModelShape) -> tuple[list[int], int, int]:
    sar.initialize_comms()
    return train(json_file, shape, 3)


@pytest.fixture
def no_resource_tracker() -> Iterator[None]:
    """End multiprocessing's own helper, which otherwise lives as long as the program that once started a process."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("no_resource_tracker")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from Linux's /proc")
@pytest.mark.parametrize("kind, hidden", [("sage", 384), ("gcn", 384), ("gat", 512)])
def test_peak_memory_is_predicted_to_15_percent(tmp_path: Path, kind: Any, hidden: int) -> None:
    """Where tensors dominate: the rise above the level before the first epoch, and all that is resident."""
    graph = random_graph(40_000, 300_000, 128)
    json_file = partition_graph(graph, tmp_path, "random", 2).json_file
    shape = ModelShape(kind, (128, hidden, hidden, 16), heads=4)
    command = [sys.executable, "-m", "sar.cli", "plan", str(json_file), "--json", "--model", kind, "--hidden"]
    done = subprocess.run(
        [*command, str(hidden)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    planned = json.loads(done.stdout)
    assert planned["model"]["widths"] == list(shape.widths)
    measured = run_workers(train_in_process, str(json_file), shape, n_workers=2, n_threads=1, time_limit=240)
    for worker, (sent, start, rise) in zip(planned["workers"], measured, strict=True):
        memory = worker["memory"]
        print(f"{kind}: rise {rise / 1e6:.0f} MB, predicted {memory['rise'] / 1e6:.0f}", end="; ")
        print(f"all {(start + rise) / 1e6:.0f} MB, predicted {memory['total'] / 1e6:.0f}")
        assert rise > 180e6
        assert memory["rise"] == pytest.approx(rise, rel=0.15)
        assert memory["total"] == pytest.approx(start + rise, rel=0.15)
        assert set(sent) == {worker["bytes_sent"]}


def test_the_fewest_workers_that_fit(directory) -> None:
    report, shape = inspect_directory(directory(2)), ModelShape("sage", (7, 4096, 4096, 5))
    largest = max(worker.memory.total for worker in plan_training(report, shape).workers)
    enough = plan_training(report, shape, memory=largest)
    assert enough.fewest_workers is not None
    assert 1 <= enough.fewest_workers <= 2
    less = plan_training(report, shape, memory=largest - 8 * 10**6)
    assert less.fewest_workers is None or less.fewest_workers >= enough.fewest_workers
    assert plan_training(report, shape, memory=10**8).fewest_workers is None
    assert "nor would any number" in plan_training(report, shape, memory=10**8).as_text()
    assert f"fit {largest / 1e6:,.1f} MB each" in enough.as_text()


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    typed = inspect_directory(partition_graph(small_types(), tmp_path, "typed", 2).json_file)
    assert typed.problems == []
    with pytest.raises(ConfigError, match="plans are for homogeneous graphs"):
        plan_training(typed, ModelShape("sage", (3, 2)))
    with pytest.raises(ConfigError, match="cannot be divided among 4 heads"):
        ModelShape("gat", (8, 30, 4), 4)
    with pytest.raises(ConfigError, match="at least two of at least 1"):
        ModelShape("gcn", (8, 0, 4))
