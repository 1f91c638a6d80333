"""Link prediction on sampled neighbours: GraphSAGE, trained on batches of edges from all workers.

    torchrun --nproc-per-node 2 examples/link_prediction_minibatch.py --partition-json partitions/cora/cora.json

A tenth of the links is held out: neighbours are never drawn along them. The others are told from pairs drawn for each
batch, which sees neither its own links nor the edges back. Then each held-out link is ranked among 100 drawn pairs that
begin at the same node; the mean of 1 / rank is the MRR.
"""

from typing import Any

import sar  # isort: skip  (before dgl)
import dgl.function as fn
import dgl.nn
import torch
import torch.nn.functional as F
from common import options
from torch import Tensor, nn

from sar.train.metrics import mean_reciprocal_rank

parser = options(__doc__, epochs=5, batch_size=256, negatives=1, ranked=100, num_workers=0, lr=0.003, weight_decay=0.0)
parser.add_argument("--fanouts", type=int, nargs=2, default=[10, 10], help="for each layer (10 10); -1 for all")


class GraphSAGE(nn.Module):
    def __init__(self, num_features: int, hidden: int):
        super().__init__()
        self.first = dgl.nn.SAGEConv(num_features, hidden, "mean")
        self.last = dgl.nn.SAGEConv(hidden, hidden, "mean")

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        return self.last(blocks[1], F.relu(self.first(blocks[0], x)))


def scores(pairs: Any, h: Tensor) -> Tensor:
    """Of each pair, (S,): the product of what the model makes of its ends."""
    with pairs.local_scope():
        pairs.ndata["h"] = h
        pairs.apply_edges(fn.u_dot_v("h", "h", "score"))
        return pairs.edata["score"].squeeze(1)


def main(argv: list[str] | None = None) -> None:
    arguments = parser.parse_args(argv)
    sar.initialize_comms()  # rank, number of workers and address come from torchrun
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    graph, x = sar.construct_full_graph(data), sar.suffix_key_lookup(data.node_features, "feat")

    edges, back = graph.edata["_ID"], sar.reverse_edges(graph)  # of this worker's edges
    link = torch.minimum(edges, back)  # both directions of a link have one number
    test = (link * 2654435761 >> 16) % 10 == 0
    graph.edata["drawn"] = (~test).float()
    once = edges < back  # each link once, and no loops

    def loader(links: Tensor, negatives: int, **options: Any) -> sar.DataLoader:
        neighbors = sar.DistNeighborSampler(
            arguments.fanouts, prob="drawn", input_node_features={"feat": x}, copy_edata=False
        )
        sampler = sar.EdgePredictionSampler(neighbors, "reverse_id", back, negative_sampler=negatives)
        seeds = sar.split_edges(graph, links)  # as many on every worker, so some are other workers' edges
        return sar.DataLoader(
            graph,
            seeds,
            sampler,
            arguments.batch_size,
            num_workers=arguments.num_workers,
            foreign_seeds=True,
            **options,
        )

    sar.seed(arguments.seed)  # of batches too
    batches = loader(once & ~test, arguments.negatives, shuffle=True)
    held_out = loader(once & test, arguments.ranked)
    model = GraphSAGE(x.shape[1], arguments.hidden)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr, weight_decay=arguments.weight_decay)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loaders": [batches, held_out]}
    first = 0
    if arguments.checkpoint:
        first = sar.load_checkpoint(arguments.checkpoint, **state, missing_ok=True)["step"]
    for epoch in range(first, arguments.epochs):
        total = torch.zeros(())
        for _, links, others, blocks in batches:  # as many on every worker, some of which may be empty
            h = model(blocks, blocks[0].srcdata["feat"])
            count = sar.all_sum(links.num_edges() + others.num_edges())  # on all workers
            loss = (F.softplus(-scores(links, h)).sum() + F.softplus(scores(others, h)).sum()) / count
            optimizer.zero_grad()
            loss.backward()
            sar.gather_grads(model)  # sums, as for the whole graph
            optimizer.step()
            total += loss.detach() / len(batches)
        scored = []
        with torch.no_grad():
            for _, links, others, blocks in held_out:
                h = model(blocks, blocks[0].srcdata["feat"])
                scored.append((scores(links, h), scores(others, h).view(-1, arguments.ranked)))
        mrr = mean_reciprocal_rank(*(torch.cat(column) for column in zip(*scored, strict=True)))
        sar.print(f"epoch {epoch}: loss {sar.all_sum(total):.6f}, test MRR {mrr:.4f}")
        if arguments.checkpoint:
            sar.save_checkpoint(arguments.checkpoint, **state, step=epoch + 1)


if __name__ == "__main__":
    main()
