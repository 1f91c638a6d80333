"""Link prediction on the whole graph: a GCN, and dot products of node pairs on any workers.

    torchrun --nproc-per-node 2 examples/link_prediction.py --partition-json partitions/cora/cora.json

A tenth of the links is held out. The others are told from pairs that are drawn anew for every epoch. Then each held-out
link is ranked among 100 drawn pairs that begin at the same node; the mean of 1 / rank is the MRR.
"""

import argparse

import sar  # isort: skip  (before dgl)
import dgl.function as fn
import dgl.nn
import torch
import torch.nn.functional as F
from common import options, train
from torch import Tensor, nn

from sar.train.metrics import mean_reciprocal_rank

parser = options(__doc__, negatives=1, ranked=100, epochs=50, weight_decay=0.0)


class GCN(nn.Module):
    def __init__(self, num_features: int, hidden: int):
        super().__init__()
        self.first = dgl.nn.GraphConv(num_features, hidden, allow_zero_in_degree=True)
        self.last = dgl.nn.GraphConv(hidden, hidden, allow_zero_in_degree=True)

    def forward(self, graph, x):  # x: (N_i, F) -> (N_i, H)
        return self.last(graph, F.relu(self.first(graph, x)))


def scores(pairs, h):  # (N_i, H) -> (E_i,), one for each pair whose destination is this worker's
    with pairs.local_scope():
        pairs.ndata["h"] = h
        pairs.apply_edges(fn.u_dot_v("h", "h", "score"))
        return pairs.edata["score"].squeeze(1)


def edges(data: sar.PartitionData) -> tuple[Tensor, Tensor]:
    """Global IDs of the ends of this worker's edges, (E_i,) each."""
    shards = [shard.edges for shard in data.all_shard_edges]
    return torch.cat([src for src, _ in shards]), torch.cat([dst for _, dst in shards])


def held_out(src: Tensor, dst: Tensor) -> Tensor:
    """A tenth of the edges by their ends' original IDs: the same on any partitioning, both directions of a link."""
    low, high = torch.minimum(src, dst), torch.maximum(src, dst)
    mixed = (low * 1_000_003 + high) * 6364136223846793005  # wraps around
    return ((mixed >> 33) % 10 == 0) & (src != dst)


def corrupted(src: Tensor, count: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """For each source `count` pairs with a destination drawn from all nodes."""
    src = src.repeat_interleave(count)
    return src, torch.randint(num_nodes, src.shape)


class LinkTask:
    """Telling linked pairs from others; the graph, without the held-out links, has the nodes of `whole`."""

    def __init__(self, whole: sar.GraphShardManager, data: sar.PartitionData, arguments: argparse.Namespace):
        self.arguments, self.num_nodes = arguments, whole.num_nodes_global()
        src, dst = edges(data)
        test = held_out(*(sar.fetch_rows(whole, data.node_features["orig_id"], ends) for ends in (src, dst)))
        self.graph = sar.pair_graph(whole, src[~test], dst[~test])
        links = src < dst  # each link once
        self.src = src[links & ~test]
        self.links = sar.pair_graph(whole, self.src, dst[links & ~test])
        src, dst = src[links & test], dst[links & test]
        self.tests = sar.pair_graph(whole, src, dst)
        self.others = sar.pair_graph(whole, *corrupted(src, arguments.ranked, self.num_nodes))

    def loss(self, h: Tensor) -> Tensor:
        """This worker's share of the mean binary cross-entropy over all pairs."""
        count = self.arguments.negatives
        drawn = sar.pair_graph(self.graph, *corrupted(self.src, count, self.num_nodes))
        total = F.softplus(-scores(self.links, h)).sum() + F.softplus(scores(drawn, h)).sum()
        return total / (self.links.num_edges_global() * (1 + count))

    def mrr(self, h: Tensor) -> float:
        """The mean reciprocal rank of the held-out links, over all workers."""
        # Scores are on the worker of a pair's destination; return them to the worker that passed the pair.
        linked, others = (pairs.in_given_order(scores(pairs, h)) for pairs in (self.tests, self.others))
        return mean_reciprocal_rank(linked, others.view(-1, self.arguments.ranked))


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Train; returns the loss of every epoch, and the MRR after the last one."""
    arguments = parser.parse_args(argv)
    sar.initialize_comms()  # rank, number of workers and address come from torchrun
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    x = sar.suffix_key_lookup(data.node_features, "feat")
    torch.manual_seed(arguments.seed)
    model = GCN(x.shape[1], arguments.hidden)
    torch.manual_seed(arguments.seed + 1 + sar.rank())  # each worker draws different pairs
    task = LinkTask(sar.construct_full_graph(data), data, arguments)
    losses, h = train(model, (task.graph, x), task, arguments, lambda task, h: f"test MRR {task.mrr(h):.4f}")
    return losses, task.mrr(h)


if __name__ == "__main__":
    main()
