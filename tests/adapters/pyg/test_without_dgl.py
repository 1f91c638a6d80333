"""Partitioning, training, mini-batches and the commands with PyTorch Geometric where DGL cannot be imported."""

import os
import subprocess
import sys

from tests.workers import REPOSITORY

SCRIPT = """
import sys
import numpy as np
import sar
import sar.cli
assert "torch_geometric" not in sys.modules
import torch
import pyarrow.parquet as pq
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from torch_geometric.sampler import NegativeSampling

ends = torch.randint(40, (2, 200), generator=torch.Generator().manual_seed(0))
whole = Data(x=torch.randn(40, 4), edge_index=ends, y=torch.arange(40) % 3)
np.save("edges.npy", ends.numpy().T)
np.save("x.npy", whole.x.numpy())
np.save("y.npy", whole.y.numpy())
fields = ["--node-feature", "feat=x.npy", "--node-feature", "label=y.npy"]
command = ["partition", "edges.npy", "--num-nodes", "40", *fields, "--split", "0.5,0.2,0.3", "--parts", "2"]
assert not sar.cli.main([*command, "--method", "multilevel", "--out", "files"])
assert not sar.cli.main([*command, "--method", "metis", "--num-hops", "2", "--out", "metis"])
assert not sar.cli.main(["inspect", "files"])
assert not sar.cli.main(["chunk", "edges.npy", "--chunks", "2", "--name", "mine", "--out", "chunked"])
assert not sar.cli.main(["plan", "files", "--model", "gat"])
assert sar.cli.main(["demo", "--dataset", "karate"]) == 1

sar.initialize_comms(0, 1, "127.0.0.1", "gloo", None, 0)
sar.partition_graph(whole, "graph", 2, "memory", part_method="random")
for directory in ("memory", "files", "metis"):
    data = sar.pyg.load_partition(directory)
    torch.manual_seed(0)
    conv = GATConv(4, 3)
    out = conv(data.x, data.edge_index)
    torch.nn.functional.cross_entropy(out, data.y).backward()
    sar.gather_grads(conv)
    torch.testing.assert_close(out, conv(whole.x, whole.edge_index)[data.orig_id])
    back = sar.to_original_order(out.detach(), data.orig_id)
    torch.testing.assert_close(torch.from_numpy(back), conv(whole.x, whole.edge_index).detach())
graph, features = data.graph, {"feat": data.x}
neighbors = sar.DistNeighborSampler([3], input_node_features=features)
links = sar.EdgePredictionSampler(neighbors, "self", negative_sampler=NegativeSampling("binary"))
for sampler, seeds in (
    (neighbors, torch.arange(40)),
    (links, graph.edata["_ID"][:40]),
):
    for batch in sar.DataLoader(graph, seeds, sampler, 10, format="pyg"):
        assert conv(batch.x, batch.edge_index).shape == (len(batch.n_id), 3)
sar.save_checkpoint("checkpoint", model=conv, step=1)
assert sar.load_checkpoint("checkpoint", model=conv)["step"] == 1

with open("conv.py", "w") as file:
    file.write("from torch_geometric.nn import GATConv\\n")
    file.write("def make(info): return GATConv(info.in_widths['_N'], info.num_classes)\\n")
sar.save_model("conv.pt", conv)
ids = torch.randperm(1000)[:40].numpy()  # with gaps
np.save("edges.npy", ids[ends.numpy().T])
np.save("ids.npy", ids)
np.save("some.npy", ids[[17, 4]])
given = ["--ids", "map", "--node-feature", "id=ids.npy", *fields]
assert not sar.cli.main(["partition", "edges.npy", *given, "--parts", "2", "--method", "random", "--out", "gaps"])
expected = conv(whole.x, whole.edge_index).detach().numpy()
command = ["infer", "gaps", "--model", "conv.py:make", "--weights", "conv.pt", "--out"]
assert not sar.cli.main([*command, "out.parquet"])
table = pq.read_table("out.parquet")
assert (table["id"].to_numpy() == ids).all()
np.testing.assert_allclose(table["out_2"].to_numpy(), expected[:, 2], rtol=1e-5, atol=1e-6)
assert not sar.cli.main([*command, "out.npy", "--nodes", "some.npy"])
np.testing.assert_allclose(np.load("out.npy"), expected[[17, 4]], rtol=1e-5, atol=1e-6)
print("trained")
"""


FINDER = """
import sys
from importlib.machinery import PathFinder


class WithoutDgl(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "dgl" else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutDgl
"""


def environment(folder):
    """One in which `import dgl` fails as where DGL is not installed."""
    (folder / "sitecustomize.py").write_text(FINDER)
    return os.environ | {"PYTHONPATH": f"{folder}:{REPOSITORY}"}


def run(command, folder):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_without_dgl(tmp_path):
    done = run(["-c", SCRIPT], tmp_path)
    assert done.stdout.endswith("trained\n")
    assert "`import dgl` failed with ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr
