"""The example with layers of PyTorch Geometric trains as on one machine."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data

import sar
from sar.cli.demo import community_graph
from sar.partition.ingest.masks import with_split
from tests.examples.scripts import example


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
