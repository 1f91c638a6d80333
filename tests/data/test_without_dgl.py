"""A training script of plain torch, where DGL cannot be imported, gets what one beside DGL gets."""

import json
import subprocess
import sys

from tests.adapters.dgl.directories import heterogeneous_graph, write_directory
from tests.workers import REPOSITORY

TRAIN = """
import json, sys
if sys.argv[1] == "without":
    sys.modules["dgl"] = None  # importing it raises ModuleNotFoundError
import sar, torch

sar.initialize_comms(0, 1, "127.0.0.1", "gloo", None, 0)
data = sar.load_dgl_partition_data(sys.argv[2], 0, "cpu")
graph = sar.construct_full_graph(data)
losses = []
features = {name: torch.arange(graph.num_nodes(name) * 2.0).view(-1, 2) % 7 for name in graph.ntypes}
torch.manual_seed(0)
layer = torch.nn.Linear(2, 2)
sar.sync_params(layer)
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
for _ in range(2):
    loss = 0.0
    for etype in graph.canonical_etypes:
        view = graph[etype]
        view.srcdata["h"] = layer(features[etype[0]])
        logits = torch.arange(view.num_edges() * 1.0).view(-1, 1) % 3
        view.edata["a"] = sar.edge_softmax(view, logits)
        view.update_all(
            lambda edges: {"m": edges.src["h"] * edges.data["a"]}, lambda nodes: {"out": nodes.mailbox["m"].sum(1)}
        )
        loss = loss + view.dstdata["out"].square().mean()
    optimizer.zero_grad()
    loss.backward()
    sar.gather_grads(layer)
    optimizer.step()
    losses.append(loss.item())
assert ("dgl" in sys.modules and sys.modules["dgl"] is not None) == (data.partition_book is not None)
assert (data.partition_book is None) == (sys.argv[1] == "without")
print(json.dumps(losses))
"""


def losses_of(how: str, path) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, how, str(path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_training_without_dgl(tmp_path):
    path = write_directory(tmp_path, heterogeneous_graph(), 1).path
    losses = losses_of("without", path)
    assert len(set(losses)) == 2
    assert losses == losses_of("beside", path)
