"""Fields, features and settings that change between batches: each batch has those of the moment when it is sampled."""

import itertools

import dgl
import pytest
import torch

import sar
from tests.core.attempts import catch_and_recover
from tests.matrix import THREAD
from tests.sampling.cases import describe, features_of, same
from tests.sampling.scenes import parts_of, typed_parts

SIZES = [23, 17]


def change_one_worker(partition, seed_edges):
    """Whether batches, of a loop and of `sample`, have the features of their step, which worker 0 alone changes."""
    graph = sar.construct_full_graph(partition)
    features = torch.zeros(graph.num_nodes())
    sampler, seeds = sar.DistNeighborSampler([2], input_node_features={"x": features}), graph.node_ids()
    if seed_edges:
        sampler, seeds = sar.EdgePredictionSampler(sampler), graph.edata[dgl.EID]
    loader, found = sar.DataLoader(graph, seeds, sampler, 5), []
    for step, batch in enumerate(itertools.chain(loader, (None, None))):
        blocks = sampler.sample(graph, seeds[:3]) if batch is None else batch
        [block] = blocks[-1] if seed_edges else blocks
        expected = torch.where(block.srcdata[dgl.NID] < partition.node_ranges[0][1], float(step), 0.0)
        found.append(torch.equal(block.srcdata["x"], expected))
        if sar.rank() == 0:
            features += 1
    return found, len(loader) + 2


@pytest.mark.parametrize("seed_edges", [False, True])
@pytest.mark.parametrize("world_size", [2])
def test_a_change_on_one_worker_shows(pool, world_size, seed_edges):
    for found, steps in pool.run(change_one_worker, seed_edges, per_rank=parts_of(SIZES).partitions):
        assert found == [True] * steps


def in_inference_mode(partition):
    """Whether features are right in an epoch, after a change in place in inference mode, in it and after it."""
    graph, found = sar.construct_full_graph(partition), []
    with torch.inference_mode():
        features = features_of(graph.node_ids())
        graph.edata["e"] = graph.edata["_ID"].double()
    sampler = sar.DistNeighborSampler([2], input_node_features={"x": features}, output_node_features={"y": features})
    loader = sar.DataLoader(graph, graph.node_ids(), sampler, 3)
    for change in (0, 1):
        with torch.inference_mode():
            features += change
        for inside in (True, False):
            with torch.inference_mode(inside):
                for [block] in loader:
                    sides = (block.srcdata, "x"), (block.dstdata, "y")
                    found += [torch.equal(data[name], features_of(data["_ID"]) + change) for data, name in sides]
                    found.append(torch.equal(block.edata["e"], block.edata["_ID"].double()))
    return found


@pytest.mark.parametrize("world_size", [2])
def test_features_of_inference_mode(pool):
    for found in pool.run(in_inference_mode, per_rank=parts_of([7, 5]).partitions):
        assert found == [True] * 3 * 12


def same_ids(ids):
    return ids


def negative(ids):
    return -ids


FIELDS = [  # of each step: by name, what makes them of IDs
    {"a": same_ids, "b": negative},
    {"a": negative, "b": same_ids},  # the tensors that are there already
    {"a": lambda ids: ids.float().unsqueeze(1).expand(-1, 3).contiguous(), "b": same_ids},
    {"a": same_ids},
    {"a": same_ids, "b": lambda ids: ids.int() + 1},
]


def rename_fields(partition, num_workers):
    """Whether batches have the fields of their step. With a sampling thread a step is an epoch, else a batch."""
    graph = sar.construct_full_graph(partition)
    sampler, users = sar.DistNeighborSampler([3]), graph.node_ids("user")
    edges = graph.edges["follows"].data
    tables = [(edges, "", edges[dgl.EID])]
    tables += [(of, "user/", users) for of in (sampler.input_node_features, sampler.output_node_features)]
    tensors, found = {}, []

    def put(fields):
        for number, (table, prefix, ids) in enumerate(tables):
            for name in ("a", "b"):
                if name in fields:
                    tensor = tensors.setdefault((number, fields[name]), fields[name](ids))
                    table[prefix + name] = tensor
                elif prefix + name in table:
                    del table[prefix + name]

    put(FIELDS[0])
    loader = sar.DataLoader(
        graph, {"user": torch.arange(len(users))}, sampler, 100 if num_workers else 1, num_workers=num_workers
    )
    batches = (blocks for _ in FIELDS for blocks in loader) if num_workers else loader
    for number, ((block,), fields) in enumerate(zip(batches, FIELDS, strict=False), 1):
        frames = block.edges["follows"].data, block.srcnodes["user"].data, block.dstnodes["user"].data
        for frame in frames:
            found.append({"a", "b"} & set(frame) == set(fields))
            found += [torch.equal(frame[name], make(frame["_ID"])) for name, make in fields.items()]
        put(FIELDS[number % len(FIELDS)])
    return found


@pytest.mark.parametrize("world_size, num_workers", [(1, 0), (2, 0), pytest.param(2, 1, marks=THREAD)])
def test_fields_have_their_latest_names(pool, world_size, num_workers):
    for found in pool.run(rename_fields, num_workers, per_rank=typed_parts(world_size).partitions):
        assert len(found) == 3 * (len(FIELDS) + sum(map(len, FIELDS)))
        assert all(found)


NEW_SETTINGS = [
    {"fanouts": [5]},
    {"fanouts": [-1, 1], "replace": True},
    {"prob": "w"},
    {"copy_edata": False},
    {"input_node_features": {"new": torch.zeros}, "output_node_features": {"x": torch.ones}},
]


def change_settings(partition, settings, num_workers):
    """Descriptions of the batches after a change, and of those of a sampler that was made so."""
    graph = sar.construct_full_graph(partition)
    graph.edata["w"] = (graph.edata["_ID"] % 3 == 0).double()
    count = graph.num_nodes()
    settings = {k: {n: f(count) for n, f in v.items()} if "features" in k else v for k, v in settings.items()}
    before = {"fanouts": [2, 2], "input_node_features": {"x": torch.arange(count)}}
    found = []
    for sampler in (sar.DistNeighborSampler(**before), sar.DistNeighborSampler(**(before | settings))):
        loader = sar.DataLoader(graph, graph.node_ids(), sampler, 5, seed=3, num_workers=num_workers)
        batches = iter(loader)
        if num_workers:  # then settings take effect with the next epoch
            list(batches)
        else:
            next(batches)
        for name, value in settings.items():
            setattr(sampler, name, value)
        found.append([describe(batch) for batch in (loader if num_workers else batches)])
    return found


@pytest.mark.parametrize(
    "settings, num_workers", [*((each, 0) for each in NEW_SETTINGS), pytest.param(NEW_SETTINGS[0], 1, marks=THREAD)]
)
@pytest.mark.parametrize("world_size", [2])
def test_settings_take_effect_with_the_next_batch(pool, world_size, settings, num_workers):
    for after, as_made in pool.run(change_settings, settings, num_workers, per_rank=parts_of(SIZES).partitions):
        assert after
        assert same(after, as_made)


def refused_settings(partition):
    sar.Config.timeout = 20
    graph = sar.construct_full_graph(partition)
    sampler = sar.DistNeighborSampler([2])
    links = sar.EdgePredictionSampler(sampler)
    loader = sar.DataLoader(graph, graph.node_ids(), sampler, 5)
    for made, name, value in [(loader, "batch_size", 2), (loader, "seed", 1), (links, "exclude", "self")]:
        with pytest.raises(sar.errors.ConfigError, match=f"{name} of .* cannot be changed; make another"):
            setattr(made, name, value)
    found = []
    for name, value in (("fanouts", 5), ("input_node_features", ["x"]), ("fanouts", [2 + sar.rank()])):
        sampler = sar.DistNeighborSampler([2])
        next(iter(sar.DataLoader(graph, graph.node_ids(), sampler, 5)))
        setattr(sampler, name, value)
        found.append(catch_and_recover(sampler.sample, graph, graph.node_ids()[:3]))
    return found


@pytest.mark.parametrize("world_size", [2])
def test_settings_that_cannot_be_changed(pool, world_size):
    for wrong, no_dictionary, unlike in pool.run(refused_settings, per_rank=parts_of(SIZES).partitions):
        assert "fanouts is 5" in wrong.message
        assert "expected a dictionary" in no_dictionary.message
        assert unlike.kind == "DisagreementError"
