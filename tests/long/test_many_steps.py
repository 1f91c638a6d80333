"""Thousands of epochs and of sampled batches: memory, file descriptors and threads stay as they are."""

import ctypes
import gc
import os
from pathlib import Path
from typing import NamedTuple

import dgl.nn
import pytest
import torch
from torch import nn

import sar
from tests.parity.harness import parameter_gradients
from tests.sampling.scenes import parts_of

STEPS = 2000
MIB = 2**20
GROWTH = 8 * MIB
"""From the first tenth of the steps to the end: 4.5 KiB a step, less than one forgotten tensor of rows."""
WIDTH = 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Usage(NamedTuple):
    """Of one process; memory in bytes."""

    memory: int
    descriptors: int
    threads: int


def settled() -> Usage:
    """Of this process, without what it could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return Usage(memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def assert_flat(early: Usage, late: Usage, growth: int) -> None:
    """Memory has grown by `growth` bytes at most, descriptors and threads not at all."""
    print(f"memory {early.memory / MIB:.1f} -> {late.memory / MIB:.1f} MiB, {late}")
    assert late.memory - early.memory <= growth
    assert late.descriptors <= early.descriptors
    assert late.threads <= early.threads


class Model(nn.Module):
    """Attention with dropout, a mean, normalised by all workers, and embeddings beside features."""

    def __init__(self, graph):
        super().__init__()
        self.embedding = sar.nn.DistEmbedding(graph, WIDTH)
        self.attention = dgl.nn.GATConv(WIDTH, WIDTH // 2, 2, attn_drop=0.2, allow_zero_in_degree=True)
        self.norm = sar.DistributedBN1D(WIDTH)
        self.mean = dgl.nn.SAGEConv(WIDTH, 4, "mean")

    def forward(self, graph, x):
        x = self.attention(graph, x + self.embedding()).flatten(1)
        return self.mean(graph, self.norm(x).relu())


def many_epochs(partition):
    """Usage after a tenth of the epochs and after all."""
    sar.patch_dgl()
    sar.Config.max_collective_size = 40 * WIDTH
    graph = sar.construct_full_graph(partition)
    x = torch.randn(graph.num_nodes(), WIDTH)
    model = Model(graph)
    sar.sync_params(model)
    optimizer, sparse = torch.optim.Adam(model.parameters()), sar.nn.SparseAdam([model.embedding])
    found = []
    for epoch in range(STEPS):
        loss = model(graph, x).square().sum()
        optimizer.zero_grad()
        sparse.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        sparse.step()
        if epoch == STEPS // 10:
            found.append(settled())
    assert torch.isfinite(loss)
    sar.unpatch_dgl()
    return [*found, settled()]


@pytest.mark.parametrize("world_size", [2])
def test_epochs(pool):
    parts = parts_of([150, 250], edges_per_node=6)
    for early, late in pool.run(many_epochs, per_rank=parts.partitions, timeout=1200):
        assert_flat(early, late, GROWTH)


def many_batches(partition):
    """Usage after a tenth of the batches and after all, of which two are sampled ahead."""
    graph = sar.construct_full_graph(partition)
    x = torch.randn(graph.num_nodes(), WIDTH)
    model = dgl.nn.SAGEConv(WIDTH, 4, "mean")
    sampler = sar.DistNeighborSampler([4, 4], input_node_features={"x": x})
    loader = sar.DataLoader(graph, graph.node_ids(), sampler, 16, shuffle=True, seed=1, num_workers=2)
    batches, found, sampled = 0, [], 0
    while batches < STEPS:
        for blocks in loader:
            rows = blocks[0].srcdata["x"].requires_grad_()
            loss = model(blocks[1], model(blocks[0], rows).repeat(1, WIDTH // 4)).square().sum()
            model.zero_grad()
            loss.backward()
            parameter_gradients(model)
            sampled += blocks[0].num_edges()
        batches += len(loader)
        if len(found) == 0 and batches >= STEPS // 10:
            found.append(settled())
    assert sampled > batches
    return [*found, settled()]


@pytest.mark.parametrize("world_size", [2])
def test_sampled_batches(pool):
    parts = parts_of([150, 250], edges_per_node=6)
    for early, late in pool.run(many_batches, per_rank=parts.partitions, timeout=1200):
        assert_flat(early, late, GROWTH)
