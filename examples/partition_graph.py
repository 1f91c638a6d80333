"""Partition a graph into a directory that the other examples train on.

    python examples/partition_graph.py --parts 2 --out partitions/cora

The graph is a generated one of Cora's size, or with `--graph` a data set of `dgl.data`, such as CoraGraphDataset, or a
file of `dgl.save_graphs`. It gets the reverse of every edge and a self-loop at each node; without masks, a random
split. A graph of several types gets a reverse relation for each of its relations.
"""

import argparse
from pathlib import Path
from typing import Any

import sar  # isort: skip  (before dgl)
import dgl
import torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--graph", help="a class of dgl.data, or a file of dgl.save_graphs")
parser.add_argument("--parts", type=int, default=2, help="number of partitions (%(default)s)")
parser.add_argument("--out", required=True, type=Path, help="output directory")


def generated(num_nodes: int = 2708, num_edges: int = 10_556, num_classes: int = 7) -> Any:
    """A graph whose features depend on the class, with most edges within classes."""
    torch.manual_seed(0)
    label = torch.randint(num_classes, (num_nodes,))
    src, dst = torch.randint(num_nodes, (2, 5 * num_edges))
    kept = ((label[src] == label[dst]) | (torch.rand(len(src)) < 0.05)).nonzero().squeeze(1)[: num_edges // 2]
    graph = dgl.graph((src[kept], dst[kept]), num_nodes=num_nodes)
    graph.ndata["label"] = label
    graph.ndata["feat"] = torch.eye(num_classes, 64)[label] + torch.randn(num_nodes, 64)
    return graph


def load(name: str | None) -> Any:
    if name is None:
        return generated()
    return dgl.load_graphs(name)[0][0] if Path(name).exists() else getattr(dgl.data, name)()[0]


def prepare(graph: Any) -> Any:
    """Prepare the graph for training."""
    if len(graph.canonical_etypes) > 1:
        return dgl.AddReverse()(graph)
    graph = dgl.add_self_loop(dgl.remove_self_loop(dgl.to_bidirected(graph, copy_ndata=True)))
    if "train_mask" not in graph.ndata:
        torch.manual_seed(0)
        split = torch.rand(graph.num_nodes())
        for part, low, high in (("train", 0.0, 0.6), ("val", 0.6, 0.8), ("test", 0.8, 1.0)):
            graph.ndata[f"{part}_mask"] = (low <= split) & (split < high)
    return graph


def main() -> None:
    arguments = parser.parse_args()
    graph = prepare(load(arguments.graph))
    name = arguments.out.name
    sar.partition_graph(graph, name, arguments.parts, arguments.out, balance_edges=True)
    script = Path(__file__).with_name("full_graph.py" if graph.is_homogeneous else "rgcn.py")
    json_file = arguments.out / f"{name}.json"
    print(f"{graph.num_nodes():,} nodes and {graph.num_edges():,} edges in {arguments.parts} partitions")
    print(f"train with: torchrun --nproc-per-node {arguments.parts} {script} --partition-json {json_file}")


if __name__ == "__main__":
    main()
