"""Divide a graph into one part per worker, in a directory that the other examples train on.

    python examples/partition_graph.py --parts 2 --out partitions/cora

The graph is a generated one of Cora's size; or, with `--dataset`, in a file that `sar.open_graph` reads, or a name that
`dgl.data` (cora, reddit, ...) or the Open Graph Benchmark (ogbn-arxiv, ...) knows. The graph gets the reverse of every
edge and one self-loop per node; without a split of its own, a random one. A heterogeneous graph gets a reverse relation
for each of its relations.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import sar
from sar.cli.demo import community_graph
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import divide, training_graph
from sar.partition.ingest.datasets import load_dataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dataset", help="a file, or a name")
parser.add_argument("--data", help="folder of downloads")
parser.add_argument("--parts", type=int, default=2, help="number of parts, which is the number of workers")
parser.add_argument("--out", required=True, type=Path, help="directory to make")
parser.add_argument(
    "--leave-out", nargs="*", default=[], metavar="A:R:B", help="relations to drop, such as those that tell the labels"
)


def read(dataset: str | None, downloads: str | None, scratch: str) -> GraphSource:
    if dataset is None:
        return community_graph(2708, 10_556, num_features=1433, num_classes=7, homophily=0.8, signal=0.04)
    return sar.open_graph(dataset, scratch) if Path(dataset).exists() else load_dataset(dataset, downloads)


def main() -> None:
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        graph = read(arguments.dataset, arguments.data, scratch)
        if graph.is_homogeneous:
            graph, model = training_graph(graph), "full_graph.py"
        else:
            names = {":".join(etype): etype for etype in graph.edges}
            if unknown := {*arguments.leave_out} - names.keys():
                parser.error(f"there are no relations {', '.join(unknown)}; expected some of {', '.join(names)}.")
            kept = {etype: graph.edges[etype] for name, etype in names.items() if name not in arguments.leave_out}
            graph, model = replace(graph, edges=kept).with_reverse_edges(), "rgcn.py"
        name = Path(arguments.dataset or arguments.out).stem
        report = divide(graph, arguments.out, name, arguments.parts)
    print(
        f"{sum(report.nodes):,} nodes and {sum(report.edges):,} edges "
        f"in parts of {report.nodes} nodes, {report.edges} edges"
    )
    print(f"edge cut {report.edge_cut:.1%}")
    script = Path(__file__).with_name(model)
    print(f"train with: torchrun --nproc-per-node {arguments.parts} {script} --partition-json {report.json_file}")


if __name__ == "__main__":
    main()
