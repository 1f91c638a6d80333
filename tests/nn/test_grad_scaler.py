"""`torch.amp.GradScaler` with the sparse optimizers: the same rows as without; an overflow skips a step everywhere."""

import pytest
import torch

import sar
from tests.core.attempts import catch, require
from tests.sampling.scenes import parts_of

COUNTS = {1: [5], 2: [3, 4], 3: [4, 0, 3], 4: [1, 2, 0, 3], 5: [1, 2, 0, 3, 1], 8: [1, 2, 0, 3, 1, 1, 1, 2]}
STEPS, OVERFLOW = 6, 2


def train(partition, kind, scaled, whole, unscale):
    """Rows, state and scale after steps of which one overflows on the last worker only."""
    graph = sar.construct_full_graph(partition)
    emb = sar.nn.DistEmbedding(graph, 2, init_func=lambda shape, dtype: torch.ones(shape, dtype=dtype))
    optimizer = kind([emb], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=scaled, growth_interval=100)
    scales = []
    for number in range(STEPS):
        overflow = number == OVERFLOW and sar.rank() == sar.world_size() - 1
        if number == OVERFLOW and not scaled:
            continue
        rows = emb() if whole else emb(torch.arange(0, graph.num_nodes_global(), 1 + number % 2))
        loss = (rows * (number + 1 + sar.rank())).square().sum()
        optimizer.zero_grad()
        scaler.scale(loss * (torch.inf if overflow else 1)).backward()
        if unscale:
            optimizer.gather_grads()
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return emb().detach(), dict(optimizer.state[emb.weight]), scales


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [sar.nn.SparseAdam, sar.nn.SparseAdagrad])
def test_a_scaler_changes_nothing_but_skips_overflows(pool, world_size, kind, unscale):
    parts = parts_of(COUNTS[world_size]).partitions
    for whole in (False, True):
        expected = pool.run(train, kind, False, whole, False, per_rank=parts)
        found = pool.run(train, kind, True, whole, unscale, per_rank=parts)
        for (rows, state, scales), (expected_rows, expected_state, _) in zip(found, expected, strict=True):
            assert scales == [2.0**16] * OVERFLOW + [2.0**15] * (STEPS - OVERFLOW)
            assert state.keys() == expected_state.keys()
            # Adagrad and Adam are given the same gradients to the bit, as the scale is a power of two.
            assert torch.equal(rows, expected_rows)
            assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(expected_state[k])) for k in state)


def unscale_too_early(partition):
    graph = sar.construct_full_graph(partition)
    emb = sar.nn.DistEmbedding(graph, 2)
    optimizer, scaler = sar.nn.SparseAdam([emb]), torch.amp.GradScaler("cpu")
    scaler.scale(emb().sum()).backward()
    scaler.unscale_(optimizer)
    return require(catch(scaler.step, optimizer))


@pytest.mark.parametrize("world_size", [2])
def test_unscaling_before_the_sums_is_refused(pool):
    for failure in pool.run(unscale_too_early, per_rank=parts_of(COUNTS[2]).partitions):
        assert failure.kind in ("ConfigError", "PeerError")
        assert "gather_grads" in failure.message
