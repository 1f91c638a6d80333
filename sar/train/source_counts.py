"""What a plan knows of a graph, counted before the graph is written."""

from dataclasses import replace

import numpy as np

from sar.partition.assign.stream import count_crossing
from sar.partition.graph_data import Array
from sar.partition.graph_source import CHUNK_ROWS, GraphSource
from sar.partition.write.write import Written, written_report
from sar.train.graph_counts import LABEL, GraphCounts, counts_of


def count_source(
    graph: GraphSource, part_of: Array, num_parts: int, *, in_width: int | None = None, num_classes: int | None = None
) -> GraphCounts:
    """What `count_graph` finds in a directory to which an assignment of a graph's nodes is written.

    One pass over the edges; P / 8 bytes of memory a node.

    Args:
        graph: the graph.
        part_of: (N,) the part of every node, 0 to P - 1.
        num_parts: P.
        in_width, num_classes: as in `count_graph`.

    Raises:
        ConfigError: the graph lacks a feature that would say what is left out, or an edge ends outside the graph.
    """
    crossing = {}
    for etype in graph.edges:
        of_type = replace(graph, edges={etype: graph.edges[etype]})  # nodes keep their numbers
        counted = count_crossing(of_type.chunks(), part_of, num_parts)
        crossing[etype] = counted.edges.T, counted.halo.T
    nodes = np.empty((num_parts, len(graph.num_nodes)), np.int64)
    for number, ntype in enumerate(graph.num_nodes):
        first = graph.first_node[ntype]
        nodes[:, number] = np.bincount(part_of[first : first + graph.num_nodes[ntype]], minlength=num_parts)
    edges = np.stack([edges.sum(axis=1) for edges, _ in crossing.values()], axis=1)
    # A node that is read by several types counts in each, unlike in a directory; no plan asks for the sum.
    sums = [np.sum(matrices, axis=0) for matrices in zip(*crossing.values(), strict=True)]
    report = written_report(graph, part_of, Written(nodes, edges, *sums), graph.name, "")
    of_types = {etype: (edges.tolist(), halo.tolist()) for etype, (edges, halo) in crossing.items()}
    return counts_of(report, of_types, in_width, num_classes, lambda: _largest_label(graph))


def even_share(counts: GraphCounts, num_parts: int, *, shown: int = 1) -> GraphCounts:
    """Some of P parts that have as much of everything, rounded down, and read nothing from each other.

    Args:
        counts: of the graph as one part.
        num_parts: P.
        shown: how many of the parts. Default 1.
    """
    relations = []
    for relation in counts.relations:
        edges = [[0] * shown for _ in range(shown)]
        for part in range(shown):
            edges[part][part] = relation.edges[0][0] // num_parts
        relations.append(replace(relation, edges=edges, halo=[[0] * shown for _ in range(shown)]))
    nodes = [{ntype: count // num_parts for ntype, count in counts.nodes[0].items()}] * shown
    return replace(counts, nodes=nodes, train_nodes=[counts.train_nodes[0] // num_parts] * shown, relations=relations)


def _largest_label(graph: GraphSource) -> float:
    columns = [
        fields[LABEL] for fields in graph.node_data.values() if LABEL in fields and len(fields[LABEL].shape) == 1
    ]
    starts = [(column, start) for column in columns for start in range(0, column.shape[0], CHUNK_ROWS)]
    return max((float(np.max(column[start : start + CHUNK_ROWS])) for column, start in starts), default=-1.0)
