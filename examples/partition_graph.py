"""Divide a graph into one part per worker, in a directory that the other examples train on.

    python examples/partition_graph.py --dataset cora.npz --parts 2 --out partitions/cora

The graph is an .npz file, or a name that `dgl.data` (cora, reddit, ...) or the Open Graph Benchmark (ogbn-arxiv, ...)
knows. Where cora.npz is not there, a generated graph of Cora's size is written to it. The graph gets the reverse of
every edge and one self-loop per node; without a split of its own, a random one. A heterogeneous graph, from an .npz
file, gets a reverse relation for each of its relations.
"""

import argparse
from pathlib import Path

from sar.cli.demo import community_graph
from sar.partition.in_memory import divide, training_graph
from sar.partition.ingest.datasets import load_dataset
from sar.partition.npz_files import write_npz

CORA = "cora.npz"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dataset", default=CORA, help="an .npz file, or a name (%(default)s)")
parser.add_argument("--data", help="folder of .npz files and of downloads")
parser.add_argument("--parts", type=int, default=2, help="number of parts, which is the number of workers")
parser.add_argument("--out", required=True, type=Path, help="directory to make")
parser.add_argument(
    "--leave-out", nargs="*", default=[], metavar="A:R:B", help="relations to drop, such as those that tell the labels"
)


def main() -> None:
    arguments = parser.parse_args()
    if arguments.dataset == CORA and not Path(CORA).exists():
        write_npz(community_graph(2708, 10_556, num_features=1433, num_classes=7, homophily=0.8, signal=0.04), CORA)
        print(f"there is no {CORA} here: made a generated graph of that size")
    graph = load_dataset(arguments.dataset, arguments.data)
    if graph.is_homogeneous:
        graph, model = training_graph(graph), "full_graph.py"
    else:
        graph, model = graph.without(arguments.leave_out).with_reverse_edges(), "rgcn.py"
    name = Path(arguments.dataset).stem
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
