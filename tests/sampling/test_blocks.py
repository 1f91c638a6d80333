"""`DistNeighborSampler.sample`: blocks are those of the graph, whatever its partitioning, and refuse bad requests."""

import pkgutil

import dgl
import pytest
import torch

import sar
from tests.core.attempts import catch_and_recover
from tests.matrix import corner
from tests.parity.blocks import some_seeds
from tests.parity.scenarios import SCENARIOS
from tests.sampling.cases import add_edge_feature, check_blocks, describe, node_features


def sample(mine, fanouts, options):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    features = node_features(partition)
    sampler = sar.DistNeighborSampler(
        fanouts, input_node_features={"x": features}, output_node_features={"_N/y": features}, **options
    )
    return describe(sampler.sample(graph, seeds))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [1, corner(2), 3])
def test_blocks_of_every_graph(pool, world_size, scenario, replace):
    parts = SCENARIOS[scenario](world_size)
    for how in ("all", "uneven", "last only"):
        seeds = some_seeds(parts, how)
        fanouts = [3, -1, 2]
        given = list(zip(parts.partitions, seeds, strict=True))
        for rank, described in enumerate(pool.run(sample, fanouts, {"replace": replace}, per_rank=given)):
            check_blocks(parts, described, seeds[rank], fanouts, replace)


def sample_with(mine, how):
    """Ask for a block, or make a loader, in a way that is wrong on worker 0."""
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    start, end = partition.node_ranges[sar.rank()]
    wrong, fanouts, options = sar.rank() == 0, [2], {}
    graph.edata["w"] = torch.ones(graph.num_edges(), dtype=torch.float64)
    if how == "foreign":
        seeds = torch.tensor([end]) if wrong else seeds
    elif how == "loader foreign":
        return len(sar.DataLoader(graph, torch.tensor([end]) if wrong else seeds, sar.DistNeighborSampler(fanouts)))
    elif how == "flow graph":
        (graph,) = sar.construct_mfgs(partition, seeds, 1)
    elif how.startswith("prob"):
        graph.edata["w"] *= float(how.split()[1]) if wrong else 1.0
        options = {"prob": "w"}
    elif how in ("layers", "edge type"):
        fanouts = ([2, 2] if how == "layers" else [{"likes": 2}]) if wrong else fanouts
    else:
        options = {
            "no such prob": {"prob": "v" if wrong else "w"},
            "rows": {"input_node_features": {"x": torch.ones(end - start + wrong, 2)}},
            "width": {"input_node_features": {"x": torch.ones(end - start, 2 + wrong)}},
            "node type": {"output_node_features": {"paper/x" if wrong else "x": torch.ones(end - start, 2)}},
        }[how]
    return sar.DistNeighborSampler(fanouts, **options).sample(graph, seeds)[0].num_edges()


WRONG_WEIGHTS = ["prob -1", "prob 1e201", "prob inf", "prob nan"]
REFUSED = {
    **dict.fromkeys(["foreign", "loader foreign", "flow graph"], "GraphError"),
    **dict.fromkeys(["no such prob", *WRONG_WEIGHTS, "rows", "node type", "edge type"], "FieldError"),
    **dict.fromkeys(["layers", "width"], "DisagreementError"),
}


@pytest.mark.parametrize("how, kind", REFUSED.items())
@pytest.mark.parametrize("world_size", [2])
def test_refused_on_every_worker(pool, world_size, how, kind):
    parts = SCENARIOS["random"](world_size)
    given = list(zip(parts.partitions, some_seeds(parts, "few"), strict=True))
    outcomes = pool.outcomes(sample_with, how, per_rank=given)
    assert outcomes[0].kind == kind, outcomes[0]
    assert outcomes[1].kind in (kind, "PeerError"), outcomes[1]


def sample_around_a_failure(mine, stage):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    sampler = sar.DistNeighborSampler([2, 2], input_node_features={"x": node_features(partition)})
    sampler.prepare(graph)
    original = pkgutil.resolve_name(*stage)
    with pytest.MonkeyPatch.context() as patch:
        if sar.rank() == 1:  # virtual workers have one module
            patch.setattr(*stage, lambda *args: 1 // 0 if sar.rank() == 1 else original(*args))
        failure = catch_and_recover(sampler.sample, graph, seeds)
    return failure, len(sampler.sample(graph, seeds))


@pytest.mark.parametrize("stage", ["sar.sampling.batch.draw_in_edges", "sar.sampling.batch.fetch_features"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_failure_within_a_batch_reaches_all_and_the_next_batch_is_made(pool, world_size, stage):
    parts = SCENARIOS["random"](world_size)
    given = list(zip(parts.partitions, some_seeds(parts, "all"), strict=True))
    for rank, (failure, blocks) in enumerate(pool.run(sample_around_a_failure, [stage], per_rank=given)):
        assert failure.kind == ("ZeroDivisionError" if rank == 1 else "PeerError"), failure
        assert rank == 1 or "Worker 1 raised ZeroDivisionError" in failure.message
        assert blocks == 2


def drawn_by_weights(partition):
    """For weights of every dtype, whether all edges but those of weight 0 are drawn where all neighbours are."""
    graph, found = sar.construct_full_graph(partition), {}
    kept = graph.edata[dgl.EID] % 3 > 0
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.float32, torch.float64):
        graph.edata["w"] = kept.to(dtype).unsqueeze(1)
        (block,) = sar.DistNeighborSampler([-1], prob="w").sample(graph, graph.node_ids())
        found[dtype] = block.edata[dgl.EID].sort().values.tolist() == graph.edata[dgl.EID][kept].sort().values.tolist()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_of_every_dtype(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    assert all(all(found.values()) for found in pool.run(drawn_by_weights, per_rank=parts.partitions))


def load_foreign(mine):
    partition, seeds = mine
    graph = sar.construct_full_graph(partition)
    add_edge_feature(graph)
    features = node_features(partition)
    sampler = sar.DistNeighborSampler([3, 2], input_node_features={"x": features}, output_node_features={"y": features})
    loader = sar.DataLoader(graph, seeds, sampler, batch_size=6, foreign_seeds=True)
    return [describe(blocks) for blocks in loader]


@pytest.mark.parametrize("world_size", [2])
def test_seeds_of_other_partitions(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    shares = [torch.arange(rank, parts.num_nodes, 2) for rank in range(world_size)]
    for rank, batches in enumerate(pool.run(load_foreign, per_rank=list(zip(parts.partitions, shares, strict=True)))):
        chosen = [described[-1]["dst"][dgl.NID] for described in batches]
        assert torch.equal(torch.cat(chosen).sort().values, shares[rank])
        for described, seeds in zip(batches, chosen, strict=True):
            check_blocks(parts, described, seeds, [3, 2], False)


def load_shared(partition):
    graph, sampler = sar.construct_full_graph(partition), sar.DistNeighborSampler([1])
    return catch_and_recover(
        lambda: sar.DataLoader(graph, torch.tensor([1, 2 + sar.rank()]), sampler, foreign_seeds=True)
    )


@pytest.mark.parametrize("world_size", [2])
def test_seeds_of_several_workers_are_refused(pool, world_size):
    for failure in pool.run(load_shared, per_rank=SCENARIOS["random"](world_size).partitions):
        assert "such as 1 to workers [0, 1]" in failure.message
