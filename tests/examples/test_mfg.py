"""Message flow graphs: training on those of the training nodes is training on the whole graph, in plain DGL too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

import sar
from sar.cli.demo import community_graph
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import divide, training_graph
from tests.examples.scripts import example, in_double
from tests.examples.test_models import double, train_alone  # noqa: F401 (a fixture)
from tests.parity.harness import assert_close
from tests.workers import WorkerPool


@dataclass
class Whole:
    """A whole homogeneous graph, with self-loops and both directions of each edge."""

    graph: Any
    x: Tensor  # (N, F)
    labels: Tensor  # (N,)
    train: Tensor  # (N,) bool
    num_classes: int

    @classmethod
    def of(cls, data: GraphSource) -> "Whole":
        graph = dgl.graph(tuple(map(torch.from_numpy, data.ends())), num_nodes=data.total_nodes)
        x, labels, train = (torch.from_numpy(data.node_data["_N"][key]) for key in ("feat", "label", "train_mask"))
        return cls(graph, x, labels, train, int(labels.max()) + 1)

    def learn(self, model: nn.Module, inputs: tuple[Any, ...], arguments: Any) -> tuple[list[float], Tensor]:
        return train_alone(model, inputs, self.labels, self.train, arguments)


@pytest.fixture(scope="module")
def communities() -> GraphSource:
    return in_double(training_graph(community_graph(300, 2400, 12, 4)))


def run_on_worker(argv: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the training nodes by message flow graphs and by the whole graph, and the nodes' original IDs."""
    torch.set_default_dtype(torch.float64)
    by_blocks, by_graph = example("mfg").main(argv)
    data = sar.load_dgl_partition_data(argv[1], sar.rank(), "cpu")
    train = data.node_features["_N/train_mask"].bool()
    return by_blocks.detach(), by_graph, data.node_features["orig_id"][train]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_of_the_seeds_are_those_on_the_whole_graph(
    pool: WorkerPool,
    tmp_path: Path,
    communities: GraphSource,
    world_size: int,
) -> None:
    json_file = divide(communities, tmp_path, "graph", world_size).json_file
    argv = ["--partition-json", str(json_file), "--epochs", "5", "--hidden", "16"]
    results = pool.run(run_on_worker, argv)
    arguments, whole = example("mfg").parser.parse_args([*argv]), Whole.of(communities)
    arguments.weight_decay = 0.0
    torch.manual_seed(0)
    model = example("mfg").GraphSAGE(whole.x.shape[1], arguments.hidden, whole.num_classes, arguments.layers)
    _, logits = whole.learn(model, ([whole.graph] * arguments.layers, whole.x), arguments)
    for by_blocks, by_graph, ids in results:
        assert len(ids)
        assert_close(by_blocks, by_graph)
        assert_close(by_graph, logits[ids])
