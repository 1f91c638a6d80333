"""Background processes: the same batches as without, and errors in bounded time where one of them ends."""

import os
import resource
import signal
import time
from pathlib import Path

import dgl
import pytest
import torch

import sar
from tests import leftovers
from tests.core.attempts import catch_and_recover
from tests.matrix import BACKGROUND, corner
from tests.parity.blocks import some_seeds
from tests.parity.scenarios import SCENARIOS
from tests.sampling.cases import add_edge_feature, check_blocks, describe, features_of, node_features
from tests.sampling.scenes import typed_parts

pytestmark = BACKGROUND

FANOUTS = [2, 3]


def make_loader(mine, **options):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    features = node_features(partition)
    sampler = sar.DistNeighborSampler(
        FANOUTS, input_node_features={"x": features}, output_node_features={"y": features}
    )
    return sar.DataLoader(graph, seeds, sampler, batch_size=4, shuffle=True, seed=3, **options)


@pytest.fixture
def given(world_size):
    parts = SCENARIOS["random"](world_size)
    return parts, list(zip(parts.partitions, some_seeds(parts, "uneven"), strict=True))


def two_epochs_and_a_half(mine, num_workers):
    """Two epochs, a third that is dropped, and which processes are left of it; then a fourth."""
    loader = make_loader(mine, num_workers=num_workers)
    epochs = [[describe(blocks) for blocks in loader] for _ in range(2)]
    pids = [one.process.pid for one in loader._idle._processes] if num_workers else []
    for _ in loader:
        break
    left = leftovers.alive(pids)
    if num_workers < 2:
        epochs.append([describe(blocks) for blocks in loader])
    return epochs, left, len(loader)


def same(a, b):
    """Whether two nests of dictionaries and lists have equal tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("world_size, numbers", [corner(1, [1]), (2, [2]), corner(2, [1]), corner(3, [1])])
def test_same_batches_with_processes(pool, world_size, numbers, given):
    parts, mine = given
    without = pool.run(two_epochs_and_a_half, 0, per_rank=mine)
    for number in numbers:
        for (epochs, left, _), (expected, _, _) in zip(
            pool.run(two_epochs_and_a_half, number, per_rank=mine, timeout=200), without, strict=True
        ):
            assert left == []
            assert same(epochs, expected[: len(epochs)])
    for (epochs, _, length), (_, seeds) in zip(without, mine, strict=True):
        assert not same(epochs[0], epochs[1])
        for batches in epochs:
            assert len(batches) == length
            chosen = [described[-1]["dst"]["_ID"] for described in batches]
            assert torch.equal(torch.cat(chosen).sort().values, seeds.sort().values)
            for described, ids in zip(batches, chosen, strict=True):
                check_blocks(parts, described, ids, FANOUTS, False)


def epoch_after_an_error(mine):
    """Worker 1 fails where the others start their processes; then all go on."""

    def fail():
        loader = make_loader(mine, num_workers=1)
        if sar.rank() == 1:
            raise ValueError("on purpose")
        next(iter(loader))

    failure = catch_and_recover(fail)
    return failure, len(list(make_loader(mine, num_workers=1)))


@pytest.mark.parametrize("world_size", [2])
def test_processes_start_after_an_error(pool, given):
    for failure, batches in pool.run(epoch_after_an_error, per_rank=given[1], timeout=100):
        assert failure is not None
        assert batches > 1


def typed_epoch(partition, num_workers):
    """All of an epoch's blocks of several node types, as tensors."""
    graph = sar.construct_full_graph(partition)
    features = {f"{ntype}/x": features_of(graph.node_ids(ntype)) for ntype in graph.ntypes}
    sampler = sar.DistNeighborSampler([dict.fromkeys(graph.canonical_etypes, 2), -1], input_node_features=features)
    seeds = {ntype: torch.arange(graph.num_nodes(ntype)) for ntype in graph.ntypes}
    loader = sar.DataLoader(
        graph, seeds, sampler, 5, shuffle=True, precompute_optimized_batches=False, seed=1, num_workers=num_workers
    )
    found = []
    for blocks in loader:
        nodes = [{t: block.srcnodes[t].data["_ID"] for t in block.srctypes} for block in blocks]
        inputs = {t: blocks[0].srcnodes[t].data["x"] for t in blocks[0].srctypes}
        assert all(torch.equal(inputs[t], features_of(ids)) for t, ids in nodes[0].items())
        edges = [
            {str(e): [*block.edges(etype=e), block.edges[e].data["_ID"]] for e in block.canonical_etypes}
            for block in blocks
        ]
        found.append([nodes, inputs, edges])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2])
def test_several_node_types(pool, world_size):
    partitions = typed_parts(world_size).partitions
    without = pool.run(typed_epoch, 0, per_rank=partitions)
    assert min(map(len, without)) > 1
    assert same(pool.run(typed_epoch, 1, per_rank=partitions, timeout=200), without)


def keep_all_batches(mine):
    """Keep many batches while few files may be open; how many, and how many descriptors they hold."""
    loader = make_loader(mine, num_workers=1)
    kept = list(loader)
    opened = [int(name) for name in os.listdir("/proc/self/fd")]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 8, limits[1]))
    try:
        for _ in range(10):
            kept += list(loader)
        return len(kept), len(os.listdir("/proc/self/fd")) - len(opened)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2])
def test_batches_hold_no_descriptors(pool, given):
    for kept, descriptors in pool.run(keep_all_batches, per_rank=given[1], timeout=200):
        assert kept > 20
        assert descriptors == 0


def keep_labels(mine):
    """Keep the labels of batches with large features; bytes of the features, and how many are still mapped."""
    partition, _ = mine
    graph = sar.construct_full_graph(partition)
    labels, features = node_features(partition), torch.ones(graph.num_nodes(), 2**18)
    seeds = torch.arange(*graph.node_ranges[sar.rank()])
    sampler = sar.DistNeighborSampler(FANOUTS, input_node_features={"x": features}, output_node_features={"y": labels})
    loader = sar.DataLoader(graph, seeds, sampler, 2, precompute_optimized_batches=False, num_workers=1)
    kept, nbytes = [blocks[-1].dstdata["y"] for blocks in loader], 0
    before = mapped_bytes()
    for _ in range(6):
        for blocks in loader:
            nbytes += blocks[0].srcdata["x"].nbytes
            kept.append(blocks[-1].dstdata["y"])
    del blocks
    return nbytes, mapped_bytes() - before


def mapped_bytes():
    """Of this process, whether the memory is its own or shared."""
    [rss] = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Rss")]
    return int(rss.split()[1]) * 1024


@pytest.mark.parametrize("world_size", [corner(2)])
def test_kept_labels_do_not_keep_features(pool, given):
    for nbytes, mapped in pool.run(keep_labels, per_rank=given[1], timeout=200):
        assert nbytes > 2**28
        assert mapped < nbytes / 4


def kill_one(mine, victim):
    """End worker 0's process, or worker 0, in the middle of an epoch; how the loader ends."""
    loader = make_loader(mine, num_workers=1, prefetch_factor=1)
    for _ in loader:
        pass
    pids = [one.process.pid for one in loader._idle._processes]
    try:
        for _ in loader:
            began = time.monotonic()
            if sar.rank() == 0:
                end = signal.SIGSTOP if victim == "frozen process" else signal.SIGKILL
                os.kill(os.getpid() if victim == "trainer" else pids[0], end)
    except sar.SarError as error:
        return type(error).__name__, str(error), time.monotonic() - began, leftovers.alive(pids)


@pytest.mark.parametrize("world_size", [2])
def test_dead_process_is_an_error_everywhere(pool, given):
    ends = pool.run(kill_one, "process", per_rank=given[1], timeout=200)
    assert ends[0][0] == "SamplingError"
    assert "signal 9" in ends[0][1]
    for kind, message, seconds, left in ends:
        assert kind in ("SamplingError", "PeerError")
        assert "sampling process 0" in message
        assert seconds < 60
        assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2])
def test_a_frozen_process_is_an_error_everywhere(pool, given):
    ends = pool.run(kill_one, "frozen process", per_rank=given[1], timeout=200)
    for kind, message, seconds, left in ends:
        assert kind in ("SamplingError", "PeerError")
        assert "has shown no sign of life" in message
        assert seconds < 180  # after 120 of silence
        assert left == []


@pytest.mark.parametrize("world_size", [2])
def test_dead_trainer_ends_its_processes(pool, given):
    outcomes = pool.outcomes(kill_one, "trainer", per_rank=given[1], timeout=200)
    assert outcomes[0].kind == "Died"
    deadline = time.monotonic() + 30
    while left := [line for line in leftovers.marked_processes() if "sampling.process" in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def die_in_an_epoch(mine):
    """Worker 0 is killed in the middle of an epoch without background processes; how the other ends."""
    loader = make_loader(mine)
    try:
        for _ in loader:
            began = time.monotonic()
            if sar.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    except sar.SarError as error:
        return type(error).__name__, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2])
def test_dead_trainer_without_processes(pool, given):
    first, second = pool.outcomes(die_in_an_epoch, per_rank=given[1])
    assert first.kind == "Died"
    kind, seconds = second.value
    assert kind == "PeerError"
    assert seconds < 60


def changed_unseen(mine, num_workers):
    """Features, edge fields and weights of two epochs, changed by one worker, in ways that leave no trace."""
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    features, wide = torch.ones(graph.num_nodes(), 3), torch.ones(graph.num_nodes(), 4)
    graph.edata["e"] = torch.ones(graph.num_edges())
    graph.edata["w"] = torch.ones(graph.num_edges())
    sampler = sar.DistNeighborSampler(
        [3],
        prob="w",
        input_node_features={"x": features, "y": wide[:, 1:]},
        output_node_features={"x": features},
        feature_cache_bytes=10_000,
    )
    how = {"batch_size": 4, "precompute_optimized_batches": False, "seed": 3, "num_workers": num_workers}
    loader = sar.DataLoader(graph, seeds, sampler, **how)
    found = []
    for epoch in range(2):
        if sar.rank() == 0 and epoch:
            features.numpy()[:] = 5 * epoch
            wide.data[:] = 5 * epoch
            graph.edata["e"].data.fill_(5 * epoch)
            graph.edata["w"].numpy()[:] = 1 - epoch  # no edge into worker 0 is drawn in the last
        found.append([describe(blocks) for blocks in loader])
    return found


@pytest.mark.parametrize("world_size", [corner(1), 2])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_changes_without_a_trace(pool, world_size, num_workers, given):
    parts, mine = given
    _, end = parts.partitions[0].node_ranges[0]
    for epochs in pool.run(changed_unseen, num_workers, per_rank=mine, timeout=200):
        for epoch, batches in enumerate(epochs):
            value = 5 * epoch if epoch else 1
            for (block,) in batches:
                sources, seeds = (block[side][dgl.NID] for side in ("src", "dst"))
                of_worker_0 = sources < end
                for field in (block["src"]["x"], block["src"]["y"]):
                    assert (field[of_worker_0] == value).all()
                    assert (field[~of_worker_0] == 1).all()
                assert (block["dst"]["x"][seeds < end] == value).all()
                into_worker_0 = seeds[block["edges"][1]] < end
                assert not (epoch == 1 and into_worker_0.any())
                assert torch.equal(block["edata"]["e"], torch.where(into_worker_0, float(value), 1.0))
