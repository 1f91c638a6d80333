"""The report on a partition directory: parts, edge cut, balances, and rows read from other parts."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sar.common_tuples import SPLIT, StrPath
from sar.partition.inspect.text_tables import as_text

REPORT_JSON = "report.json"
LABELS = ("label", "labels", "y")


@dataclass(frozen=True)
class FeatureReport:
    """A feature of all parts."""

    of: str  # "nodes" or "edges"
    type: str  # of nodes, or of edges as `source:relation:destination`
    name: str
    dtype: str
    shape: tuple[int, ...]  # of a row; () is one number

    @property
    def width(self) -> str:
        return " x ".join(map(str, self.shape)) or "1"


@dataclass(frozen=True)
class PartReport:
    """One part."""

    nodes: dict[str, int]  # by type
    in_edges: dict[str, int]  # by type
    edges_from: list[int]  # (P,) in-edges by the part of their source
    rows_from: list[int]  # (P,) distinct sources of these edges by part; 0 at the part itself
    split: dict[str, int]  # number of nodes in each of train_mask, val_mask and test_mask that exists

    @property
    def num_nodes(self) -> int:
        return sum(self.nodes.values())

    @property
    def num_edges(self) -> int:
        """Edges into the part."""
        return sum(self.in_edges.values())

    @property
    def halo(self) -> int:
        """Nodes of other parts that the part reads."""
        return sum(self.rows_from)


@dataclass(frozen=True)
class DirectoryReport:
    """The contents of a partition directory, from `inspect_directory`."""

    name: str  # name of the graph in the JSON file
    method: str  # partition method in the JSON file
    format: str  # the program that wrote it, if known
    orig_node_ids: str | None  # file with the original node IDs, if any
    orig_edge_ids: str | None  # file with the original edge IDs, if any
    num_nodes: dict[str, int]  # by type
    num_edges: dict[str, int]  # by type
    features: list[FeatureReport]
    parts: list[PartReport]
    problems: list[str]  # inconsistencies with their files; empty if the directory is sound
    counts: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)  # as in `PartitionJson`

    @property
    def cut_edges(self) -> list[int]:
        """The number of in-edges from other parts, by part."""
        return [sum(part.edges_from) - part.edges_from[p] for p, part in enumerate(self.parts)]

    @property
    def edge_cut(self) -> float:
        """Fraction of edges between parts, 0 to 1."""
        return sum(self.cut_edges) / max(1, sum(self.num_edges.values()))

    @property
    def replication_factor(self) -> float:
        """Rows (own and halo) of all parts together, divided by the number of nodes."""
        num_nodes = sum(self.num_nodes.values())
        return (num_nodes + sum(part.halo for part in self.parts)) / max(1, num_nodes)

    @property
    def masks(self) -> list[str]:
        """Masks of any part, in the usual order."""
        return sorted({mask for part in self.parts for mask in part.split}, key=SPLIT.index)

    @property
    def balances(self) -> dict[str, float]:
        """Largest part divided by the mean, for nodes, in-edges, and the nodes of each mask."""
        nodes, in_edges = [part.num_nodes for part in self.parts], [part.num_edges for part in self.parts]
        measured = {mask: [part.split.get(mask, 0) for part in self.parts] for mask in self.masks}
        return {name: _balance(of) for name, of in {"nodes": nodes, "in-edges": in_edges, **measured}.items()}

    @property
    def traffic(self) -> list[list[int]]:
        """(P, P): entry [p][q] is the number of rows that p sends to q in one exchange."""
        return [[reader.rows_from[p] for reader in self.parts] for p in range(len(self.parts))]

    @property
    def remarks(self) -> list[str]:
        """Likely mistakes in a sound directory: labels that are not classes."""
        return [
            f"{one.type}/{one.name} is {one.dtype} of width {one.width}: classes are one whole number a node. Right "
            "for regression, or for several labels a node."
            for one in self.features
            if one.name in LABELS and (one.shape or one.dtype.startswith(("float", "bfloat")))
        ]

    def summary(self) -> dict[str, Any]:
        """All fields and derived figures, in types that JSON supports."""
        fields = dataclasses.asdict(dataclasses.replace(self, counts=None))
        del fields["counts"]  # `edges_from` and `rows_from` by edge type
        return fields | {
            "remarks": self.remarks,
            "edge_cut": self.edge_cut,
            "replication_factor": self.replication_factor,
            "balances": self.balances,
            "cut_edges": self.cut_edges,
            "halo": [part.halo for part in self.parts],
            "traffic": self.traffic,
        }

    def save(self, folder: StrPath) -> Path:
        """Write `report.json`, which replaces an earlier one, and return its path."""
        file = Path(folder) / REPORT_JSON
        file.write_text(json.dumps(self.summary(), indent=1) + "\n", encoding="utf-8")
        return file

    def as_text(self) -> str:
        """Format the report for people: a few lines, and a table of parts with cut, replication and balances."""
        nodes, edges = sum(self.num_nodes.values()), sum(self.num_edges.values())
        places = {"nodes": self.orig_node_ids, "edges": self.orig_edge_ids}
        lists = {
            "nodes": [f"{name} {count:,}" for name, count in self.num_nodes.items()],
            "edges": [f"{name} {count:,}" for name, count in self.num_edges.items()],
            "features": [f"{one.type}/{one.name} {one.dtype} x {one.width}" for one in self.features],
            "original IDs": [f"{what} in {place}" for what, place in places.items() if place],
        }
        rows = [("part", "nodes", "halo", "in-edges", "cut", *(mask.removesuffix("_mask") for mask in self.masks))]
        for p, (part, cut) in enumerate(zip(self.parts, self.cut_edges, strict=True)):
            split = [part.split.get(mask, 0) for mask in self.masks]
            rows.append((str(p), *(f"{n:,}" for n in (part.num_nodes, part.halo, part.num_edges, cut, *split))))
        return "\n".join(
            [
                f"{self.name or 'graph without a name'}: {nodes:,} nodes, {edges:,} edges in {len(self.parts)} parts",
                f"format: {self.format}; method: {self.method or 'not said'}",
                *(f"{what}: {', '.join(those) or 'none'}" for what, those in lists.items()),
                f"\n{as_text(rows, left=1)}\n",
                f"edge cut {self.edge_cut:.2%}, replication factor {self.replication_factor:.3f}; largest / mean: "
                + ", ".join(f"{name} {value:.3f}" for name, value in self.balances.items()),
                *self.remarks,
                *(["\nnot sound:", *(f"  {problem}" for problem in self.problems)] if self.problems else ["\nsound"]),
            ]
        )


def _balance(counts: Sequence[int]) -> float:
    """Largest over mean; 1 if all are 0."""
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
