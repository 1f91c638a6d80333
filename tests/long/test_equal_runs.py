"""Two runs with one seed end with the same bits: a sampling thread, dropout, embeddings and their optimizers."""

import dgl.nn
import pytest
import torch

import sar
from tests.sampling.scenes import parts_of
from tests.workers import WorkerPool

EPOCHS, WIDTH = 20, 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(partition, num_workers):
    """What is trained, and the state of its optimizer, after epochs of batches and of the whole graph."""
    sar.patch_dgl()
    torch.manual_seed(11)
    graph = sar.construct_full_graph(partition)
    embedding = sar.nn.DistEmbedding(graph, WIDTH)
    conv = dgl.nn.GATConv(WIDTH, 4, 2, attn_drop=0.3, allow_zero_in_degree=True)
    out = dgl.nn.SAGEConv(WIDTH, 3, "mean", feat_drop=0.3)
    model = torch.nn.ModuleList([conv, out])
    sar.sync_params(model)
    optimizer, sparse = torch.optim.Adam(model.parameters()), sar.nn.SparseAdam([embedding], lr=0.05)
    loader = sar.DataLoader(
        graph,
        graph.node_ids(),
        sar.DistNeighborSampler([3, 3]),
        16,
        shuffle=True,
        num_workers=num_workers,
    )

    def step(first, second, rows):
        loss = out(second, conv(first, rows).flatten(1)).square().sum() / 100
        optimizer.zero_grad()
        sparse.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        sparse.step()
        return loss.detach()

    losses = []
    for _ in range(EPOCHS):
        for first, second in loader:
            losses.append(step(first, second, embedding(first.srcdata["_ID"])))
        losses.append(step(graph, graph, embedding()))
    state = sparse.state[embedding.weight]
    moments = [state[name] for name in sparse.row_state]
    return [torch.stack(losses), *(p.detach() for p in model.parameters()), embedding.weight.detach(), *moments]


def test_bits_are_equal():
    """In workers of their own each time; and whoever samples."""
    partitions = parts_of([90, 60], edges_per_node=5).partitions
    runs = []
    for num_workers in (2, 2, 0):
        pool = WorkerPool(2)
        try:
            runs.append(pool.run(train, num_workers, per_rank=partitions, timeout=180))
        finally:
            pool.close()
    for other in runs[1:]:
        for mine, theirs in zip(runs[0], other, strict=True):
            assert len(mine) > 5
            assert all(map(torch.equal, mine, theirs))
