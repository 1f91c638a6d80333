"""The graph of a case, cut for workers and whole for one machine, and its features, in double precision."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.common_tuples import PartitionData
from tests.combinations.cases import DTYPES, SIZES, Case
from tests.parity.harness import Data, build, deal, random_data
from tests.parity.scenarios import SCENARIOS


@dataclass(repr=False)
class Share:
    """What one worker is given, or one machine.

    partition: of this worker; None on one machine.
    whole: DGL's graph on one machine; None on a worker.
    nodes: global IDs of its nodes.
    count: nodes on all workers.
    edges: of one machine, whose edges have their original order, the place of each of the workers' edges there.
    """

    partition: PartitionData | None
    whole: Any
    data: Data
    nodes: Tensor
    count: int
    edges: Tensor | None = None

    def graph(self, mode: str) -> Any:
        if self.partition is None:
            return self.whole
        self.data.partition = self.partition
        return build(self.partition, int(mode[-1]))


def shares(case: Case, workers: int) -> tuple[list[Share], Share]:
    """Of all workers, and of one machine."""
    parts = SCENARIOS[case.graph](workers)
    data, ids = _features(case, random_data(parts, torch.float64, case.number)), torch.arange(parts.num_nodes)
    mine = [
        Share(partition, None, piece, nodes, parts.num_nodes)
        for (partition, piece), nodes in zip(deal(parts, data), parts.split_nodes(ids), strict=True)
    ]
    order = parts.edge_ids.argsort()
    in_order = Data(data.nodes, {name: rows[order] for name, rows in data.edges.items()})
    return mine, Share(None, parts.original(), in_order, ids, parts.num_nodes, parts.edge_ids)


def _features(case: Case, data: Data) -> Data:
    """Features of the case's size, rounded to its precision; a cotangent that may be of some rows only."""
    for name in ("x", "y"):
        data.nodes[name] = data.nodes[name] * SIZES[case.size]
    if case.backward == "loss of some rows":
        for cotangent in (data.nodes["cotangent"], data.edges["edge cotangent"]):
            cotangent[len(cotangent) // 3 :] = 0
    dtype = DTYPES[case.dtype]
    return Data(*({k: v.to(dtype).double() for k, v in columns.items()} for columns in (data.nodes, data.edges)))
