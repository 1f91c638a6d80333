"""The examples with layers of PyTorch Geometric: GAT trains as on one machine, R-GCN learns on several node types."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data, HeteroData

import sar
from sar.cli.demo import community_graph
from sar.partition.ingest.masks import with_split
from tests.examples.scripts import example


def labelled(num_nodes, generator):
    """A split, and labels that tell nothing but can be learned."""
    split = torch.rand(num_nodes, generator=generator)
    return {
        "y": torch.randint(3, (num_nodes,), generator=generator),
        "train_mask": split < 0.5,
        "test_mask": split >= 0.5,
    }


def communities():
    arrays = with_split(community_graph(300, 2400, num_features=12, num_classes=4))
    fields = {name: torch.from_numpy(values) for name, values in arrays.node_data["_N"].items()}
    return Data(
        x=fields["feat"].double(),
        y=fields["label"],
        train_mask=fields["train_mask"],
        test_mask=fields["test_mask"],
        edge_index=torch.from_numpy(np.stack(arrays.ends())),
    )


def run(name, argv):
    torch.set_default_dtype(torch.float64)
    try:
        return example(name).main(argv)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gat_trains_as_on_one_machine(pool, world_size, tmp_path):
    data = communities()
    sar.partition_graph(data, "graph", 2, str(tmp_path))
    argv = ["--partition-json", str(tmp_path), "--epochs", "4", "--dropout", "0", "--hidden", "4", "--heads", "2"]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = example("pyg_gat").GAT(12, 4, 2, 4, 0.0)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    expected = []
    for _ in range(4):
        loss = cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in pool.run(run, "pyg_gat", argv):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world_size", [2])
def test_rgcn_learns(pool, tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["author"].num_nodes, data["paper"].num_nodes = 40, 60
    for name, values in labelled(60, generator).items():
        data["paper"][name] = values
    for source, relation, target, counts in [
        ("author", "writes", "paper", (40, 60)),
        ("paper", "by", "author", (60, 40)),
    ]:
        ends = [torch.randint(count, (200,), generator=generator) for count in counts]
        data[source, relation, target].edge_index = torch.stack(ends)
    sar.partition_graph(data, "graph", 2, str(tmp_path), part_method="random")
    first, second = pool.run(run, "pyg_rgcn", ["--partition-json", str(tmp_path), "--epochs", "30", "--lr", "0.05"])
    assert first == second
    assert first[-1] < 0.2 * first[0]
