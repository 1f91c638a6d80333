"""Two runs with one seed are the same to the bit: dropout, order of sums, messages and draws depend on nothing else."""

import dgl.nn
import pytest
import torch
from torch import nn

import sar
from tests.parity.harness import build, random_shares, weighted_sum


class Model(nn.Module):
    """Attention with dropout, then a mean of neighbours."""

    def __init__(self):
        super().__init__()
        self.first = dgl.nn.GATConv(6, 4, 2, feat_drop=0.2, attn_drop=0.3)
        self.last = dgl.nn.SAGEConv(8, 3, "mean", feat_drop=0.1)

    def forward(self, graphs, x):
        return self.last(graphs[1], self.first(graphs[0], x).flatten(1).relu())


def train(mine, seed):
    """Losses on the whole graph and on sampled batches, what was sampled, and the parameters in the end."""
    partition, data = mine
    sar.patch_dgl()
    torch.manual_seed(seed)
    sar.Config.comm_buffer_bytes = 4000  # several tiles
    graph = build(partition, 1).remove_self_loop().add_self_loop()
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = sar.DataLoader(
        graph,
        graph.node_ids(),
        sar.DistNeighborSampler([3, 3], input_node_features={"x": data.nodes["x"]}, copy_edata=False),
        batch_size=8,
        shuffle=True,
    )
    found = []

    def step(out, cotangent):
        loss = weighted_sum(out, cotangent)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        found.append(loss.detach())

    for _ in range(3):
        step(model([graph, graph], data.nodes["x"]), data.nodes["cotangent"])
        for blocks in loader:
            found.append(blocks[0].srcdata[dgl.NID])
            step(model(blocks, blocks[0].srcdata["x"]), data.nodes["cotangent"][: blocks[-1].num_dst_nodes()])
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("world_size", [2])
def test_one_seed_one_result(pool, world_size):
    mine = random_shares(world_size)
    once, again, other = (pool.run(train, seed, per_rank=mine) for seed in (5, 5, 6))
    for found, repeated, different in zip(once, again, other, strict=True):
        assert len(found) == len(repeated)
        assert all(map(torch.equal, found, repeated))
        assert not all(map(torch.equal, found, different))
