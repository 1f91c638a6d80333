"""Partitioning, training and mini-batches with PyTorch Geometric where DGL cannot be imported."""

import subprocess
import sys

from tests.workers import REPOSITORY

SCRIPT = """
import sys
sys.modules["dgl"] = None  # importing it raises ModuleNotFoundError
import sar
assert "torch_geometric" not in sys.modules
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GATConv

sar.initialize_comms(0, 1, "127.0.0.1", "gloo", None, 0)
ends = torch.randint(40, (2, 200), generator=torch.Generator().manual_seed(0))
whole = Data(x=torch.randn(40, 4), edge_index=ends, y=torch.arange(40) % 3)
sar.partition_graph(whole, "graph", 2, sys.argv[1], part_method="random")
data = sar.pyg.load_partition(sys.argv[1])
torch.manual_seed(0)
conv = GATConv(4, 3)
out = conv(data.x, data.edge_index)
torch.nn.functional.cross_entropy(out, data.y).backward()
sar.gather_grads(conv)
torch.testing.assert_close(out, conv(whole.x, whole.edge_index)[data.orig_id])
sampler = sar.DistNeighborSampler([3], input_node_features={"feat": data.x})
loader = sar.DataLoader(data.edge_index.graph, torch.arange(40), sampler, 10, format="pyg")
assert sum(batch.batch_size for batch in loader) == 40
print("trained")
"""


def test_without_dgl(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")
