"""More workers than cores, and more partitions than a machine has cores."""

import os

import dgl.nn
import numpy as np
import pytest
import torch

import sar
from sar.cli import main
from sar.partition.inspect.inspection import inspect_directory
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.sampling.scenes import parts_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKERS, CORES, EPOCHS = 8, 2, 5


def trained(graph, data):
    """Logits and gradients after some epochs, on two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    sar.patch_dgl()
    first, second = dgl.nn.GATConv(6, 4, 2, allow_zero_in_degree=True), dgl.nn.SAGEConv(8, 8, "mean")
    x, layers = data.leaf("x"), torch.nn.ModuleList([first, second]).double()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = second(graph, first(graph, x).flatten(1))
        weighted_sum(out, data.nodes["cotangent"]).backward()
        gradients = parameter_gradients(layers)
        optimizer.step()
    sar.unpatch_dgl()
    return {"node out": out, "node x.grad": x.grad, **gradients}


@pytest.mark.parametrize("world_size", [WORKERS])
def test_eight_workers_on_two_cores(pool):
    parts = parts_of([30, 0, 45, 20, 60, 10, 25, 40], edges_per_node=8)
    own = os.sched_getaffinity(0)
    try:
        check(pool, parts, random_data(parts, torch.float64), [(trained, ())], timeout=400)
    finally:
        os.sched_setaffinity(0, own)


def test_64_partitions(tmp_path):
    """Written, inspected, and loaded one after the other: their edges together are those of the input."""
    nodes, edges, parts = 20_000, 300_000, 64
    src, dst = np.random.default_rng(0).integers(0, nodes, (2, edges))
    np.save(tmp_path / "edges.npy", np.stack([src, dst], axis=1))
    options = [
        "--parts",
        str(parts),
        "--num-nodes",
        str(nodes),
        "--memory-limit",
        "1GiB",
        "--out",
        str(tmp_path / "parts"),
    ]
    assert main(["partition", str(tmp_path / "edges.npy"), *options]) == 0
    assert inspect_directory(tmp_path / "parts").problems == []
    json_file, found, new_to_old = str(tmp_path / "parts" / "edges.json"), [], []
    for rank in range(parts):
        data = sar.load_dgl_partition_data(json_file, rank, "cpu")
        new_to_old.append(data.node_features["orig_id"])
        assert len(data.all_shard_edges) == parts
        found += [torch.stack(shard.edges) for shard in data.all_shard_edges]
    ends = torch.cat(new_to_old)[torch.cat(found, 1)].numpy()
    wanted, got = src * nodes + dst, ends[0] * nodes + ends[1]
    assert np.array_equal(np.sort(wanted), np.sort(got))
