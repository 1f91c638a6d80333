"""SuperGATConv's loss in training, which tells edges from pairs that are none: each worker's share of it.

Kim and Oh 2021, "How to find your friendly neighborhood".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.nn import SuperGATConv

from sar.adapters.pyg.edge_index import DistributedEdgeIndex, edges_of
from sar.adapters.pyg.guarded import wraps
from sar.comm.collectives import all_sum
from sar.errors import GraphError
from sar.nn.rows import pair_graph

TRIES = 3
"""How often as many pairs are drawn as are wanted, of which edges are left out; as PyTorch Geometric does."""


def install() -> None:
    """Replace what the layer calls."""
    SuperGATConv.forward = _forward(SuperGATConv.forward)
    SuperGATConv.negative_sampling = _negative_sampling(SuperGATConv.negative_sampling)
    SuperGATConv.get_attention_loss = _get_attention_loss(SuperGATConv.get_attention_loss)


def _forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def forward(
        self: Any, x: Tensor, edge_index: Tensor, neg_edge_index: Tensor | None = None, batch: Tensor | None = None
    ) -> Tensor:
        self.__dict__["_loss_is_shared"] = shared = isinstance(edge_index, DistributedEdgeIndex)
        if shared and not (neg_edge_index is None or isinstance(neg_edge_index, DistributedEdgeIndex)):
            raise GraphError(
                "SuperGATConv got a plain tensor for neg_edge_index; expected sar.pyg.edge_index(sar.pair_graph(graph, "
                "src, dst)), where each worker gives pairs by their global IDs."
            )
        return original(self, x, edge_index, neg_edge_index, batch)

    return forward


def _negative_sampling(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def negative_sampling(self: Any, edge_index: Tensor, num_nodes: int, batch: Tensor | None = None) -> Tensor:
        """Pairs of any node and one of this worker's, no two alike, which no edge joins in either direction."""
        if not isinstance(edge_index, DistributedEdgeIndex):
            return original(self, edge_index, num_nodes, batch)
        numbering, ratio = edge_index.numbering, self.neg_sample_ratio * self.edge_sample_ratio
        joined, found = numbering.joined, edge_index.plain[0, :0]
        count, wanted = numbering.graph.num_nodes_global() * num_nodes, int(ratio * edge_index.size(1))
        for _ in range(TRIES * (count > 0)):
            drawn = torch.cat([found, torch.randint(count, (wanted,), device=found.device)]).unique()
            found = drawn[~torch.isin(drawn, joined)]
            found = found[torch.randperm(len(found), device=found.device)[:wanted]]
        own = numbering.graph.node_ids()
        return edges_of(pair_graph(numbering.graph, found // num_nodes, own[found % num_nodes]))

    return negative_sampling


def _get_attention_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def get_attention_loss(self: Any) -> Tensor:
        """This worker's share of the mean over the pairs of all workers; the shares add up to it."""
        if not self.training or not self.__dict__.get("_loss_is_shared"):
            return original(self)
        total = binary_cross_entropy_with_logits(self.att_x.mean(dim=-1), self.att_y, reduction="sum")
        return total / all_sum(len(self.att_y))

    return get_attention_loss
