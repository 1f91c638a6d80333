"""The measured models exchange what is said of them, and the graphs are what they should be."""

import numpy as np
import pytest
import torch

import sar
from benchmarks.graphs import GeneratedSize, prepare, rmat_edges
from benchmarks.models import MODELS, Exchanged, Model
from sar.adapters.dgl.models import dgl_graph
from sar.errors import ConfigError
from tests.graphs import EdgeList, PartitionedGraph, partition_in_memory
from tests.parity.harness import Mine, build, deal, random_data
from tests.parity.scenarios import scattered

SLACK = 0.02
"""Share of the bytes that agreements and alignment may add."""


def test_rmat_draws_distinct_edges_with_heavy_tails():
    src, dst = rmat_edges(1000, 8000, seed=3)
    pairs = set(zip(src.tolist(), dst.tolist(), strict=True))
    assert len(pairs) == 8000
    assert all(s != d and 0 <= s < 1000 and 0 <= d < 1000 for s, d in pairs)
    degrees = np.bincount(dst, minlength=1000)
    assert degrees.max() > 10 * degrees.mean()
    assert degrees[:100].sum() < 3000  # hubs are anywhere
    assert np.array_equal(rmat_edges(1000, 8000, seed=3), (src, dst))
    assert not np.array_equal(rmat_edges(1000, 8000, seed=4), (src, dst))
    with pytest.raises(ConfigError, match="between 10 nodes"):
        rmat_edges(10, 50)


def test_a_real_graph_gets_self_loops_and_dense_features(tmp_path):
    sparse = {"feat_data": [5.0, 6, 7], "feat_indices": [1, 0, 1], "feat_indptr": [0, 1, 1, 3], "feat_shape": [3, 2]}
    np.savez(tmp_path / "small.npz", src=[0, 1, 1], dst=[1, 1, 2], num_nodes=3, **sparse)
    prepared = prepare("small", GeneratedSize(features=7), tmp_path, tmp_path / "work", 0)
    assert prepared.graph.src.tolist() == [0, 1, 0, 1, 2]
    assert prepared.graph.dst.tolist() == [1, 2, 0, 1, 2]
    assert prepared.graph.feat.tolist() == [[0, 5], [0, 0], [6, 7]]
    for name in ("typed", "missing"):
        np.savez(tmp_path / "typed.npz", num_nodes=3)
        with pytest.raises(ConfigError, match=rf"{name}\.npz"):
            prepare(name, GeneratedSize(), tmp_path, tmp_path / "work", 0)


@pytest.mark.parametrize("name", MODELS)
def test_dense_is_the_forward_on_self_loops_alone(name):
    loops = torch.arange(20)
    model, x = Model(name, 8, 3), torch.rand(20, 8)
    torch.testing.assert_close(model.dense(x), model(dgl_graph(loops, loops, 20), x))


def needed(counts: list[list[int]], rank: int, layers: list[Exchanged], *, kept: bool) -> int:
    """Bytes that a worker has to send in one epoch; `counts[p][r]` are the rows of worker p that worker r reads.

    Each halo row travels to its readers once, its gradient back once, and the row again where the backward reads it
    and has not kept it.
    """
    read_by_others, read_of_others = sum(counts[rank]), sum(row[rank] for row in counts)
    fetches = [1 + (layer.values_read and not kept) for layer in layers]
    return sum(
        (fetch * read_by_others + (not layer.constant) * read_of_others) * layer.columns * 4
        for fetch, layer in zip(fetches, layers, strict=True)
    )


@pytest.mark.parametrize("model, columns", [("SAGE", 672), ("GCN", 672), ("GAT", 816)])
def test_columns_of_the_models(model, columns):
    """An epoch of the first two moves 128 + 256 + 16 columns out and 256 + 16 home; GAT 128 + 128 + 16 three times."""
    assert needed([[0, 1], [1, 0]], 0, Model(model, 128, 16).exchanged(), kept=False) == 4 * columns


def epoch_bytes(mine: Mine, mode: int) -> dict[str, tuple[int, int]]:
    """Bytes that this worker sends in a third epoch, without parameters' gradients, and the bound, by model."""
    sar.patch_dgl()
    graph = build(mine[0], mode)
    x, found = torch.rand(graph.num_nodes(), 32), {}
    for name in MODELS:
        model = Model(name, 32, 5)
        for _ in range(3):
            start = sar.comm.statistics()
            model(graph, x).sum().backward()
            moved = sar.comm.statistics() - start
        counts = graph.call_context().relation.plan.halo_counts
        found[name] = moved.bytes_sent, needed(counts, sar.rank(), model.exchanged(), kept=mode != 1)
    sar.unpatch_dgl()
    return found


def rmat_in_parts(workers: int) -> PartitionedGraph:
    src, dst = rmat_edges(200, 1500)
    loops = np.arange(200)
    edges = EdgeList(*(torch.from_numpy(np.append(ids, loops)) for ids in (src, dst)), 200)
    return partition_in_memory(edges, scattered(200, workers), workers)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_the_models_exchange_what_they_need(pool, world_size, mode):
    parts = rmat_in_parts(world_size)
    for found in pool.run(epoch_bytes, mode, per_rank=deal(parts, random_data(parts))):
        for name, (sent, least) in found.items():
            assert least <= sent <= (1 + SLACK) * least, name
