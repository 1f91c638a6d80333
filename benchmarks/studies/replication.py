"""SDT-GNN's comparison of partition methods, on graphs of our own: `python -m benchmarks.studies replication`.

Replication factors by method and number of parts (its figure 6), and SPRING's clusters before and after they are merged
(its table II). All graphs are made undirected, as there. Neither figure depends on how busy the machine is.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks import command
from benchmarks.edge_files import GeneratedEdges, both_ways, graph_of, prepare
from benchmarks.edge_partitioners import method_named, method_names
from benchmarks.report import describe_setting, write_section
from benchmarks.results import setting
from benchmarks.studies.quality import measure_quality
from sar.partition.assign.assigning import SPRING
from sar.partition.assign.spring import merged_clusters
from sar.partition.assign.task import AssignmentTask
from sar.partition.inspect.text_tables import as_markdown, as_text

GENERATED = "sbm", "rmat"
REAL = "amazon_computers", "coauthor_cs", "dblp_citation", "tolokers", "soc_epinions", "web_notredame", "road_bay"
BASELINES = "dbh", "greedy", "hdrf", "2ps-l"
"""What the paper compares SPRING with: DBH, PowerGraph's greedy rule, HDRF and 2PS-L."""
PARTS = 4, 8, 16, 32
"""The first is that of the clusters; the paper has no 32, and does not say of how many its clusters are."""


@dataclass(frozen=True)
class GraphResult:
    """One graph.

    factors: (nodes + halo nodes of all parts) / nodes, by method, one for each number of parts.
    uneven: the largest part's nodes over the mean, the greatest of all these.
    clustered, merged: how many clusters of SPRING's have nodes before and after merging.
    """

    graph: str
    nodes: int
    edges: int
    factors: dict[str, list[float]]
    uneven: float
    clustered: int
    merged: int


def main(argv: Sequence[str]) -> None:
    """Measure, and write the table."""
    size = GeneratedEdges(nodes=100_000, edges=2_000_000)
    methods = method_names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies replication", description=__doc__)
    command.add_paths(parser)
    command.add_graphs(parser, "--graphs", GENERATED, REAL)
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, metavar="NAME", help="(all)")
    parser.add_argument("--parts", nargs="+", type=int, default=list(PARTS), metavar="P", help="(%(default)s)")
    parser.add_argument("--nodes", type=int, default=size.nodes, metavar="N", help="of generated graphs")
    parser.add_argument("--edges", type=int, default=size.edges, metavar="N", help="of generated graphs")
    parser.add_argument("--seed", type=int, default=0, help="of graphs and methods (%(default)s)")
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        results = _measure_all(arguments, work)
    numbers = [str(number) for number in arguments.parts]
    shown = command.shown("benchmarks.studies", ["replication", *argv])
    conditions = setting(shown, {"parts": ", ".join(numbers)})
    table = factor_table(results, numbers)
    print(as_text(table))
    sections = [describe_setting(conditions), as_markdown(table), f"{compare(results)} {merging(results)}"]
    write_section(arguments.docs / "benchmarks.md", "replication", "\n\n".join(sections))


def factor_table(results: Sequence[GraphResult], numbers: Sequence[str]) -> list[tuple[str, ...]]:
    """A line for each graph, with the factors of the least and the greatest number of parts of each method."""
    ends = sorted({0, len(numbers) - 1})
    lines = [("graph", "nodes", "edges", "parts", *results[0].factors)]
    for one in results:
        factors = (", ".join(f"{of_method[i]:.2f}" for i in ends) for of_method in one.factors.values())
        lines.append((one.graph, f"{one.nodes:,}", f"{one.edges:,}", ", ".join(numbers[i] for i in ends), *factors))
    return lines


def merging(results: Sequence[GraphResult]) -> str:
    """How many times fewer clusters there are after merging."""
    times = [one.clustered / one.merged for one in results]
    return f"Merging leaves {min(times):,.1f} to {max(times):,.1f} times fewer clusters."


def compare(results: Sequence[GraphResult]) -> str:
    """How much smaller SPRING's factors are than those of the paper's baselines, over all graphs and numbers."""
    said, means = [], []
    for baseline in BASELINES:
        pairs = [
            (ours, theirs)
            for one in results
            for ours, theirs in zip(one.factors.get(SPRING, []), one.factors.get(baseline, []), strict=False)
        ]
        if pairs:
            means.append(100 * mean(1 - ours / theirs for ours, theirs in pairs))
            wins = sum(ours < theirs for ours, theirs in pairs)
            said.append(f"{means[-1]:.0f} % below `{baseline}`'s (lower in {wins} of {len(pairs)} cases)")
    uneven = f"The largest part has {max(one.uneven for one in results):.2f} times the mean number of nodes."
    if not said:
        return uneven
    return f"SPRING's factor is on average {', '.join(said)}; {mean(means):.0f} % below all of these. {uneven}"


def _measure_all(arguments: argparse.Namespace, work: Path) -> list[GraphResult]:
    """Measure every graph, in this process."""
    size = GeneratedEdges(arguments.nodes, arguments.edges)
    results: list[GraphResult] = []
    for name in command.graphs_of(arguments.graphs, GENERATED, REAL, arguments.data):
        directed, num_nodes = prepare(name, size, arguments.data, work, arguments.seed)
        results.append(measure(Path(name).stem, both_ways(directed, num_nodes), num_nodes, arguments))
        print(as_text(factor_table(results[-1:], list(map(str, arguments.parts)))), flush=True)
    return results


def measure(name: str, edges: Path, num_nodes: int, arguments: argparse.Namespace) -> GraphResult:
    """All methods and numbers of parts on one graph.

    Args:
        name: of the graph.
        edges: its file.
        num_nodes: N.
        arguments: with `methods`, `parts` and `seed`.
    """
    graph = graph_of(edges, num_nodes)
    factors: dict[str, list[float]] = {method: [] for method in arguments.methods}
    uneven = 1.0
    for method in arguments.methods:
        for parts in arguments.parts:
            with tempfile.TemporaryDirectory(dir=edges.parent) as scratch:
                part_of = method_named(method)(AssignmentTask(graph, parts, Path(scratch), arguments.seed))
            quality = measure_quality(graph, part_of, parts)
            factors[method].append(quality.replication_factor)
            uneven = max(uneven, quality.balance["nodes"])
    _, of_clusters = merged_clusters(AssignmentTask(graph, arguments.parts[0], Path("unused"), arguments.seed))
    clustered, merged = len(np.unique(of_clusters.of_node)), np.count_nonzero(of_clusters.weights[:, 0])
    return GraphResult(name, num_nodes, graph.total_edges, factors, uneven, clustered, int(merged))
