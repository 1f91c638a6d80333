"""What measurements are compared with, and that the models exchange what is said of them."""

import numpy as np
import pytest
import torch

import sar
from benchmarks.bounds import Exchanged, bytes_needed, epoch_bound, growth_exponent, share
from benchmarks.graphs import rmat_graph, with_fields
from benchmarks.models import MODELS, Model
from sar.adapters.dgl.models import dgl_graph
from sar.errors import ConfigError
from sar.partition.in_memory import training_graph
from tests.graphs import EdgeList, PartitionedGraph, partition_in_memory
from tests.parity.harness import Mine, build, deal, random_data
from tests.parity.scenarios import scattered

COUNTS = [[0, 10, 1], [20, 0, 2], [40, 5, 0]]  # [owner][reader]
SLACK = 0.02
"""Share of the bytes that agreements and alignment may add."""


def test_bytes_needed_count_every_row_once_each_way():
    # Worker 0 sends 11 rows to readers, and the gradients of 60 home.
    assert bytes_needed(COUNTS, 0, [Exchanged(100)]) == 100 * 4 * (11 + 60)
    assert bytes_needed(COUNTS, 0, [Exchanged(100, constant=True)]) == 100 * 4 * 11
    assert bytes_needed(COUNTS, 0, [Exchanged(100, values_read=True)]) == 100 * 4 * (11 + 11 + 60)
    assert bytes_needed(COUNTS, 0, [Exchanged(100, values_read=True)], kept=True) == 100 * 4 * (11 + 60)
    assert bytes_needed(COUNTS, 1, [Exchanged(3), Exchanged(1)], item_bytes=2) == 4 * 2 * (22 + 15)


@pytest.mark.parametrize("model, columns", [("SAGE", 672), ("GCN", 672), ("GAT", 816)])
def test_columns_of_the_models(model, columns):
    """An epoch of the first two moves 128 + 256 + 16 columns out and 256 + 16 home; GAT 128 + 128 + 16 three times."""
    one_row_each_way = [[0, 1], [1, 0]]
    assert bytes_needed(one_row_each_way, 0, Model(model, 128, 16).exchanged()) == 4 * columns


def test_a_wide_input_is_multiplied_first():
    first = Model("GCN", 500, 16).exchanged()[0]
    assert first == Exchanged(256, constant=False)


def test_share_is_that_of_the_worst_worker():
    assert share([50, 50], [500, 500], 100) == 1
    assert share([60, 50], [600, 400], 100) == pytest.approx(1.25)


def test_epoch_bound_hides_the_shorter_of_both():
    assert epoch_bound(1.0, 0.5, 25e6, 125e6) == 1.5
    assert epoch_bound(1.0, 0.5, 100e6, 125e6) == pytest.approx(1.8)


def test_growth_exponent():
    assert growth_exponent([1, 2, 4, 8], [3 * n**1.5 for n in (1, 2, 4, 8)]) == pytest.approx(1.5)
    assert growth_exponent([10, 100], [7, 7]) == pytest.approx(0)


def test_rmat_draws_distinct_edges_with_heavy_tails():
    graph = rmat_graph(1000, 8000, seed=3)
    pairs = {(int(s), int(d)) for s, d in zip(*graph.ends(), strict=True)}
    assert len(pairs) == 8000
    assert all(s != d and 0 <= s < 1000 and 0 <= d < 1000 for s, d in pairs)
    degrees = torch.bincount(torch.from_numpy(graph.ends()[1]), minlength=1000)
    assert degrees.max() > 10 * degrees.float().mean()
    assert degrees[:100].sum() < 3000  # hubs are anywhere
    again, other = rmat_graph(1000, 8000, seed=3), rmat_graph(1000, 8000, seed=4)
    assert np.array_equal(again.ends(), graph.ends())
    assert not np.array_equal(other.ends(), graph.ends())
    with pytest.raises(ConfigError, match="between 10 nodes"):
        rmat_graph(10, 50)


@pytest.mark.parametrize("name", MODELS)
def test_dense_is_the_forward_on_self_loops_alone(name):
    loops = torch.arange(20)
    model, x = Model(name, 8, 3), torch.rand(20, 8)
    torch.testing.assert_close(model.dense(x), model(dgl_graph(loops, loops, 20), x))


def epoch_bytes(mine: Mine, mode: int, settings: dict[str, object]) -> dict[str, tuple[int, int]]:
    """Bytes that this worker sends in a third epoch, without parameters' gradients, and the bound, by model."""
    sar.patch_dgl()
    graph = build(mine[0], mode)
    for key, value in settings.items():
        setattr(sar.Config, key, value)
    x, found = torch.rand(graph.num_nodes(), 32), {}
    for name in MODELS:
        model = Model(name, 32, 5)
        for _ in range(3):
            start = sar.comm.statistics()
            model(graph, x).sum().backward()
            moved = sar.comm.statistics() - start
        counts = graph.call_context().relation.plan.halo_counts
        needed = bytes_needed(counts, sar.rank(), model.exchanged(), kept=mode != 1)
        found[name] = moved.bytes_sent, needed
    sar.unpatch_dgl()
    return found


def rmat_in_parts(workers: int) -> PartitionedGraph:
    graph = training_graph(with_fields(rmat_graph(200, 1500), 1, 0), undirected=False)
    edges = EdgeList(*map(torch.from_numpy, graph.ends()), 200)
    return partition_in_memory(edges, scattered(200, workers), workers)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_the_models_exchange_what_they_need(pool, world_size, mode):
    parts = rmat_in_parts(world_size)
    for found in pool.run(epoch_bytes, mode, {}, per_rank=deal(parts, random_data(parts))):
        for name, (sent, needed) in found.items():
            assert needed <= sent <= (1 + SLACK) * needed, name
