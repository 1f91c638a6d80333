"""Files that the commands and scripts of the pages find in their folder, by the names that pages ask for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

import sar
from sar.adapters.dgl.models import dgl_graph
from sar.adapters.dgl.shim import require_dgl
from sar.cli.demo import community_graph
from sar.partition.graph_source import ONLY_TYPE, GraphSource
from sar.partition.in_memory import training_graph
from tests.pages.blocks import new_side, runs_of
from tests.workers import REPOSITORY


def arrays() -> GraphSource:
    """300 nodes in four classes, edges both ways and self-loops: features, labels, a split, and edge fields."""
    data = training_graph(community_graph(300, 2400, num_features=12, num_classes=4))
    generator = torch.Generator().manual_seed(0)
    w, drawn = (torch.rand(data.total_edges, generator=generator).numpy() for _ in range(2))
    return replace(data, edge_data={ONLY_TYPE: {"w": w, "train_mask": drawn < 0.8}})


def small_graph() -> Any:
    """That graph, of DGL."""
    data = arrays()
    graph = dgl_graph(*data.ends(), data.total_nodes)
    for frame, fields in ((graph.ndata, data.node_data["_N"]), (graph.edata, data.edge_data[ONLY_TYPE])):
        frame.update({name: torch.from_numpy(values[:]) for name, values in fields.items()})
    return graph


def graph(folder: Path) -> None:
    """A partition directory in two parts."""
    sar.partition_graph(arrays(), "graph", 2, folder / "partitions" / "graph")


def model(folder: Path) -> None:
    """A model of DGL's layers and one of PyTorch Geometric's, for `graph`."""
    (folder / "my_models.py").write_text(
        "import sar, torch\n\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        from dgl.nn import SAGEConv\n\n"
        "        super().__init__()\n"
        "        self.first, self.last = SAGEConv(12, 16, 'mean'), SAGEConv(16, 4, 'mean')\n\n"
        "    def forward(self, graph, x):\n"
        "        return self.last(graph, self.first(graph, x).relu())\n\n"
        "def make_model(info):\n    return Model()\n\n"
        "def pyg_model():\n    from torch_geometric.nn import GCN\n\n    return GCN(12, 16, 2, 4)\n"
    )


def larger(folder: Path) -> None:
    """The same graph as arrays, the models, and the script of the README, for two epochs."""
    whole, page = arrays(), REPOSITORY / "README.md"
    np.save(folder / "edges.npy", np.stack(whole.ends(), 1))
    for name in ("feat", "label"):
        np.save(folder / f"{name}.npy", whole.node_data["_N"][name][:])
    model(folder)
    with (folder / "my_models.py").open("a") as models:
        models.write("\n\ndef make_model(info):\n    return pyg_model()\n")
    blocks = (block for run in runs_of(page, page.read_text()) for block in run.blocks)
    diff = next(block.code for block in blocks if block.language == "diff")
    script = new_side(diff).replace("range(100)", "range(2)")
    (folder / "train.py").write_text(f"from my_models import pyg_model as Model\n{script}")


def hetero(folder: Path) -> None:
    """A partition directory of papers and authors, in one part."""
    random = torch.Generator().manual_seed(0)

    def ends(sources: int, destinations: int) -> Tensor:
        return torch.stack([torch.randint(size, (150,), generator=random) for size in (sources, destinations)])

    made = HeteroData()
    made["author", "writes", "paper"].edge_index = ends(30, 50)
    made["paper", "cites", "paper"].edge_index = ends(50, 50)
    made["paper"].feat = torch.rand(50, 6, generator=random)
    made["author"].feat = torch.rand(30, 4, generator=random)
    made["paper"].label = torch.randint(3, (50,), generator=random)
    sar.partition_graph(made, "hetero", 1, folder / "partitions" / "hetero")


def dgl(folder: Path) -> None:
    """The same graph as a file of DGL."""
    require_dgl().save_graphs(str(folder / "graph.dgl"), [small_graph()])


def examples(folder: Path) -> None:
    """The scripts of this repository."""
    (folder / "examples").symlink_to(REPOSITORY / "examples")


def edges(folder: Path) -> None:
    """The files that the commands on partitioning name."""
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 400, (3000, 2))
    np.save(folder / "edges.npy", pairs)
    np.savetxt(
        folder / "edges.csv", np.column_stack([pairs, pairs[:, :1]]), "%d", ";", header="from;to;when", comments=""
    )
    (folder / "tags.txt").write_text("# by hand\nann lee\tbob\nbob\tcy d\n")
    np.savetxt(folder / "train.txt", np.arange(0, 400, 2), "%d")
    np.savetxt(folder / "val.txt", np.arange(1, 400, 4), "%d")
    np.save(folder / "test.npy", np.arange(3, 400, 4))
    np.save(folder / "masks.npy", rng.random((400, 10)) < 0.5)
    np.save(folder / "train_edges.npy", np.arange(3000) % 5 > 0)
    np.save(folder / "weights.npy", np.append(rng.random(2999, dtype=np.float32), np.float32("nan")))
    np.save(folder / "features.npy", rng.random((400, 6), dtype=np.float32))
    np.save(folder / "labels.npy", rng.integers(0, 3, 400))
    tables = {
        "w": {"src": rng.integers(0, 300, 900), "dst": rng.integers(0, 500, 900)},
        "c": {"src": rng.integers(0, 500, 900), "dst": rng.integers(0, 500, 900)},
        "papers": {"label": rng.integers(0, 3, 500), "year": rng.integers(2000, 2020, 500)},
    }
    for name, columns in tables.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")


def script(folder: Path) -> None:
    """A training script that takes any arguments, and says who it is."""
    lines = ("import sar", "sar.initialize_comms()", "print(f'worker {sar.rank()} of {sar.world_size()}')")
    (folder / "train.py").write_text("\n".join(lines))


def npz(folder: Path) -> None:
    """A small graph as `.npz`, without loops or reverse edges."""
    data = community_graph(400, 4000, num_features=16, num_classes=4)
    src, dst = data.ends()
    fields: dict[str, Any] = dict(data.node_data["_N"])
    np.savez(folder / "cora.npz", src=src, dst=dst, num_nodes=data.total_nodes, **fields)


FILES: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (dgl, edges, examples, graph, hetero, larger, model, npz, script)
}
