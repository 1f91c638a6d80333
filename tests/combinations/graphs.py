"""The graph of a case, cut for workers and whole for one machine, and its features, in double precision."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dgl
import torch
from torch import Tensor

import sar
from sar.common_tuples import PartitionData
from tests.combinations.calls import WIDTH, Scene
from tests.combinations.cases import DTYPES, NO_SHARES, SIZES, Case
from tests.hetero_graphs import partition_hetero
from tests.parity.blocks import block_of, some_seeds
from tests.parity.harness import Data, build, random_data
from tests.parity.scenarios import SCENARIOS, scattered

RELATION = ("user", "buys", "item")


@dataclass(repr=False)
class Share:
    """What one worker is given, or one machine.

    partition: of this worker; None on one machine.
    graph: DGL's on one machine; None on a worker.
    nodes: global IDs of its nodes.
    edges: of one machine, whose edges have their original order, the place of each of the workers' edges there.
    seeds: of message flow graphs, on all workers, global IDs.
    """

    partition: PartitionData | None
    graph: Any
    data: Data
    nodes: Tensor
    seeds: Tensor | None
    count: int
    edges: Tensor | None = None

    @classmethod
    def of_one_machine(cls, graph: Any, data: Data, edges: Tensor, nodes: Tensor, seeds: Tensor | None) -> "Share":
        order = edges.argsort()
        in_order = Data(data.nodes, {name: rows[order] for name, rows in data.edges.items()})
        return cls(None, graph, in_order, nodes, seeds, graph.num_nodes(), edges)


def shares(case: Case, workers: int) -> tuple[list[Share], Share]:
    """Of all workers, and of one machine."""
    if case.graph == "one of several relations":
        return _relation(case, workers)
    parts = SCENARIOS[case.graph if case.graph in SCENARIOS else "random"](workers)
    data = _features(case, random_data(parts, torch.float64, case.number))
    if case.graph == "sampled":  # blocks have edges in another order, so weights go by the ends
        data.edges["w"] = _weight_of_ends(parts.src, parts.dst)
    seeds = torch.cat(some_seeds(parts, "uneven")) if case.graph == "message flow graph" else None
    counts = {"node": parts.node_counts, "edge": parts.edge_counts}
    ids = torch.arange(parts.num_nodes)
    mine = [
        Share(partition, None, piece, nodes, seeds, parts.num_nodes)
        for partition, piece, nodes in zip(
            parts.partitions, _split(data, counts, counts), parts.split_nodes(ids), strict=True
        )
    ]
    if case.graph == "sampled":  # blocks have no original order
        return mine, Share.of_one_machine(parts.reference(), data, torch.arange(len(parts.src)), ids, seeds)
    return mine, Share.of_one_machine(parts.original(), data, parts.edge_ids, ids, seeds)


def _split(data: Data, nodes: Mapping[str, list[int]], edges: Mapping[str, list[int]]) -> list[Data]:
    """The workers' rows; `nodes` and `edges` have the numbers of rows by name, or by kind."""
    pieces = [
        {name: rows.split(counts.get(name, counts.get(kind, []))) for name, rows in columns.items()}
        for kind, columns, counts in (("node", data.nodes, nodes), ("edge", data.edges, edges))
    ]
    workers = len(next(iter(pieces[0].values())))
    return [Data(*({name: rows[k] for name, rows in columns.items()} for columns in pieces)) for k in range(workers)]


def _features(case: Case, data: Data) -> Data:
    """Features of the case's size, rounded to its precision; a cotangent that may be of some rows only."""
    for name in ("x", "y"):
        data.nodes[name] = data.nodes[name] * SIZES[case.size]
    if case.backward == "loss of some rows":
        for cotangent in (data.nodes["cotangent"], data.edges["edge cotangent"]):
            cotangent[len(cotangent) // 3 :] = 0
    dtype = DTYPES[case.dtype]
    return Data(*({k: v.to(dtype).double() for k, v in columns.items()} for columns in (data.nodes, data.edges)))


def _weight_of_ends(src: Tensor, dst: Tensor) -> Tensor:
    return ((3 * src + dst) % 5 + 1).double().unsqueeze(1) / 4


def _relation(case: Case, workers: int) -> tuple[list[Share], Share]:
    """Users buy items, and there are other relations beside this one."""
    generator = torch.Generator().manual_seed(case.number)
    counts, edges = {"item": 13, "user": 21}, {}
    for etype, number in ((RELATION, 70), (("user", "follows", "user"), 30), (("item", "bought by", "user"), 40)):
        edges[etype] = tuple(torch.randint(counts[t], (number,), generator=generator) for t in (etype[0], etype[2]))
    given = dgl.heterograph(edges, num_nodes_dict=counts)
    assignment = {ntype: scattered(count, workers, case.number) for ntype, count in counts.items()}
    parts = partition_hetero(given, assignment, workers)
    place = {ntype: torch.argsort(ids) for ntype, ids in parts.node_ids.items()}
    ordered = {etype: (place[etype[0]][src], place[etype[2]][dst]) for etype, (src, dst) in edges.items()}
    whole = dgl.heterograph(ordered, num_nodes_dict=counts)

    def draw(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    data = Data(
        {"x": draw(21, WIDTH), "y": draw(13, WIDTH), "cotangent": draw(13, 8)},
        {"w": draw(70, 1).abs() + 0.5, "edge cotangent": draw(70, 8)},
    )
    data = _features(case, data)
    per = {ntype: torch.bincount(assignment[ntype], minlength=workers).tolist() for ntype in counts}
    of_edges = torch.bincount(assignment["item"][edges[RELATION][1]], minlength=workers).tolist()
    pieces = _split(data, {"x": per["user"], "y": per["item"], "cotangent": per["item"]}, {"edge": of_edges})
    none = torch.empty(0, dtype=torch.int64)
    mine = [Share(p, None, piece, none, None, 34) for p, piece in zip(parts.partitions, pieces, strict=True)]
    return mine, Share.of_one_machine(whole, data, parts.edge_ids[RELATION], none, None)


class Rows:
    """Which rows of a share's tensors a scene's graph has."""

    def __init__(self, case: Case, share: Share) -> None:
        self.case, self.share = case, share
        whole = share.graph
        if share.partition is not None:
            share.data.partition = share.partition
            whole = build(share.partition, int(case.mode[-1]))
        self.whole = whole
        self.part: Any = None
        self.graph = whole
        if case.graph == "one of several relations":
            self.graph = whole[RELATION]
        elif case.graph == "message flow graph":
            assert share.seeds is not None
            self.part = block_of(whole, share.data, share.seeds)
            self.graph = self.part.graph
        elif case.graph == "sampled" and share.partition is not None:
            (self.graph,) = sar.DistNeighborSampler([-1]).sample(whole, share.nodes)

    def scene(self, x: Tensor, y: Tensor, w: Tensor) -> Scene:
        """What calls are given, of this worker's `x`, `y` and `w`."""
        case, share, h = self.case, self.share, x
        g = x
        if case.graph == "one of several relations":
            g = y
        elif case.graph == "message flow graph":
            h, w = x[self.part.src], w[self.part.edges]
            g = h[: len(self.part.dst)]
        elif case.graph == "sampled" and share.partition is not None:
            ids = self.graph.srcdata[dgl.NID]
            h = sar.fetch_rows(self.whole, x, ids)
            g = h[: self.graph.num_dst_nodes()]
            src, dst = self.graph.edges()
            w = _weight_of_ends(ids[src], ids[dst]).to(w.dtype)
        nodes = None if case.graph in NO_SHARES else share.nodes
        return Scene(self.graph, self.whole, nodes, share.count, h, g, w)

    def of_edges(self, rows: Tensor) -> Tensor:
        """Rows of the graph's edges at their places among all of this worker's."""
        if self.part is None:
            return rows
        return rows.new_zeros(self.whole.num_edges(), *rows.shape[1:]).index_copy(0, self.part.edges, rows)

    def cotangent(self, edges: bool) -> Tensor:
        """(N_dst, 8), or (E, 8)."""
        rows = self.share.data.edges["edge cotangent"] if edges else self.share.data.nodes["cotangent"]
        if self.part is None:
            return rows
        return rows[self.part.edges if edges else self.part.dst]
