"""Without gradients, calls in blocks of columns give what whole ones do, where rows are more than stays in memory."""

from functools import partial

import dgl
import pytest
import torch

from sar import spillable
from sar.comm import session
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import check, random_data
from tests.parity.programs import largest, pairwise, weighted
from tests.parity.scenarios import scattered
from tests.virtual.virtual_pool import VirtualPool

EACH = 8
"""Partitions of a process: others read each row of theirs up to seven times, which is worth blocks."""


def in_blocks(compute, blocks):
    """What is computed where no rows stay in memory, in so many calls; of one process with the same bits as in one."""
    file, found = spillable.tensor_file.value, []
    for file.at_hand, calls in ((float("inf"), 1), (1.0, blocks)):
        before = session.current_group().calls
        found.append(compute())
        assert session.current_group().calls - before == calls
    assert session.current_group().world_size > EACH or torch.equal(*found)  # tiles of others are larger
    return found[1]


def outputs(graph, data, layer):
    """Of the six columns, or of the two heads, of a layer."""
    torch.manual_seed(0)
    x, w = data.nodes["x"], data.edges["w"]
    if isinstance(layer, str):
        conv = getattr(dgl.nn, layer)(6, 3, 2, allow_zero_in_degree=True).double()
        compute, blocks = partial(conv, graph, x), 2
    else:
        compute, blocks = partial(layer, graph, x, w), 6
    with torch.no_grad():
        out = compute() if spillable.tensor_file.value is None else in_blocks(compute, blocks)
    return {"node out": out.flatten(1)}


@pytest.mark.parametrize("processes", [1, 2])
def test_blocks(processes):
    workers = processes * EACH
    parts = partition_in_memory(random_graph(1, 80, 4000), scattered(80, workers), workers)
    cases = [(outputs, (layer,)) for layer in (weighted, pairwise, largest, "GATConv", "GATv2Conv", "DotGatConv")]
    check(VirtualPool(processes, EACH), parts, random_data(parts, torch.float64), cases, modes=[1])
