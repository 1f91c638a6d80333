"""A batch's features travel while the one before it is used, which nobody else notices; features that change."""

import itertools

import dgl
import pytest
import torch

import sar
from sar.comm import session
from tests.core.attempts import catch_and_recover
from tests.matrix import THREAD
from tests.sampling.cases import describe, features_of, node_features, same
from tests.sampling.scenes import parts_of, typed_parts

SIZES = [23, 17]


def make_loader(graph, features, seed=3, **options):
    sampler = sar.DistNeighborSampler([2, 2], input_node_features={"x": features}, **options)
    return sar.DataLoader(graph, graph.node_ids(), sampler, 5, shuffle=True, seed=seed)


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


def in_inference_mode(partition, num_workers):
    """Whether features are right in an epoch, after a change in place in inference mode, in it and after it."""
    graph, found = sar.construct_full_graph(partition), []
    with torch.inference_mode():
        features = features_of(graph.node_ids())
        graph.edata["e"] = graph.edata["_ID"].double()
    sampler = sar.DistNeighborSampler([2], input_node_features={"x": features}, output_node_features={"y": features})
    loader = sar.DataLoader(graph, graph.node_ids(), sampler, 3, num_workers=num_workers)
    for change in (0, 1, 1):
        with torch.inference_mode():
            features += change - (found[-1][0] if found else 0)
        for inside in (True, False):
            with torch.inference_mode(inside):
                for [block] in loader:
                    sides = (block.srcdata, "x"), (block.dstdata, "y")
                    right = [torch.equal(data[name], features_of(data["_ID"]) + change) for data, name in sides]
                    right.append(torch.equal(block.edata["e"], block.edata["_ID"].double()))
                    found.append((change, right))
    return [right for _, right in found]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=[pytest.mark.slow, THREAD])])
@pytest.mark.parametrize("world_size", [2])
def test_features_of_inference_mode(pool, num_workers):
    for found in pool.run(in_inference_mode, num_workers, per_rank=parts_of([7, 5]).partitions, timeout=120):
        assert found == [[True] * 3] * 18


def rename_fields(partition, num_workers):
    """The steps after which a batch has wrong fields, as their names, values and dtypes change from step to step.

    Without a sampling thread that is within an epoch, else a step is an epoch.
    """
    graph = sar.construct_full_graph(partition)
    sampler, users = sar.DistNeighborSampler([3]), graph.node_ids("user")
    edges = graph.edges["follows"].data
    tables = {"edges": edges, "in": sampler.input_node_features, "out": sampler.output_node_features}
    ids = {"edges": edges[dgl.EID], "in": users, "out": users}
    made_of = {}  # the function of IDs that makes a field, by table and name

    def put(name, make, kinds=tuple(tables)):
        for kind in kinds:
            made_of[kind, name] = make
            tables[kind][name if kind == "edges" else f"user/{name}"] = make(ids[kind])

    def remove(name):
        for kind, table in tables.items():
            del made_of[kind, name], table[name if kind == "edges" else f"user/{name}"]

    def exchange():
        """Of tensors that are there already, in all tables, so that their order does not change."""
        for kind, table in tables.items():
            a, b = ("a", "b") if kind == "edges" else ("user/a", "user/b")
            table[a], table[b] = table[b], table[a]
            made_of[kind, "a"], made_of[kind, "b"] = made_of[kind, "b"], made_of[kind, "a"]

    def is_right(block):
        frames = {"edges": block.edges["follows"].data, "in": block.srcnodes["user"].data}
        frames["out"] = block.dstnodes["user"].data
        fields = {(kind, name): rows for kind, frame in frames.items() for name, rows in frame.items() if name in "ab"}
        right = (torch.equal(fields[kind, name], make(frames[kind]["_ID"])) for (kind, name), make in made_of.items())
        return fields.keys() == made_of.keys() and all(right)

    put("a", lambda ids: ids)
    put("b", lambda ids: -ids)
    steps = [
        exchange,
        lambda: put("a", lambda ids: ids + 7, ["in"]),
        lambda: put("a", lambda ids: ids.float().unsqueeze(1).expand(-1, 3).contiguous()),
        lambda: remove("b"),
        lambda: put("b", lambda ids: ids.int() + 1),
        lambda: None,
    ]
    rows = {"user": torch.arange(len(users))}
    loader = sar.DataLoader(graph, rows, sampler, len(users) if num_workers else 1, num_workers=num_workers)
    batches = (blocks for _ in steps for blocks in loader) if num_workers else loader
    wrong = []
    for number, ((block,), step) in enumerate(zip(batches, steps, strict=False)):
        if not is_right(block):
            wrong.append(number)
        step()
    return wrong


@pytest.mark.parametrize("world_size, num_workers", [(1, 0), (2, 0), pytest.param(2, 1, marks=THREAD)])
def test_fields_have_their_latest_names(pool, world_size, num_workers):
    parts = typed_parts(world_size)
    assert pool.run(rename_fields, num_workers, per_rank=parts.partitions) == [[]] * world_size


def batches_of(loader):
    return [describe(blocks) for blocks in loader]


def other_calls_between(partition):
    """Batches as they come undisturbed, and with other calls and loaders between them; sums of these calls."""
    graph, features = sar.construct_full_graph(partition), node_features(partition)
    plain = [batches_of(make_loader(graph, features, seed)) for seed in (3, 4)]
    for _ in make_loader(graph, features):
        break  # the next batch is on its way
    together, sums = ([], []), []
    for both in zip(make_loader(graph, features), make_loader(graph, features, 4), strict=True):
        for kept, blocks in zip(together, both, strict=True):
            kept.append(describe(blocks))
        sums.append(sar.all_sum(sar.rank() + 1))
        next(iter(make_loader(graph, features)))
    return plain, together, sums


def recover_between(partition):
    """Batches of an undisturbed loader, and of one in whose loop the group failed and recovered."""
    graph, features = sar.construct_full_graph(partition), node_features(partition)
    found = []
    for step, blocks in enumerate(make_loader(graph, features)):
        found.append(describe(blocks))
        if step == 1:
            assert catch_and_recover(fail_on_one) is not None
    return [batches_of(make_loader(graph, features))], [found], [3] * len(found)


def fail_on_one():
    with session.current_group().guard():
        assert sar.rank() == 0, "on purpose"
        sar.all_sum(1)


@pytest.mark.parametrize("program", [other_calls_between, recover_between])
@pytest.mark.parametrize("world_size", [2])
def test_calls_between_batches(pool, world_size, program):
    for plain, disturbed, sums in pool.run(program, per_rank=parts_of(SIZES).partitions):
        assert len(plain[0]) == 5
        assert sums == [3] * 5
        assert same(plain, disturbed)


def bytes_by_batch(partition):
    """What arrives from when a batch is asked for to when the next one is; the sizes of rows that are remote."""
    graph = sar.construct_full_graph(partition)
    wide = torch.ones(graph.num_nodes(), 5000)
    start, end = partition.node_ranges[sar.rank()]
    arrived, remote, before = [], [], sar.comm.statistics()
    for blocks in make_loader(graph, wide):
        nodes, now = blocks[0].srcdata["_ID"], sar.comm.statistics()
        arrived.append((now - before).bytes_received)
        remote.append(int(((nodes < start) | (nodes >= end)).sum()) * 20_000)
        before = now
    return arrived, remote


@pytest.mark.parametrize("world_size", [2])
def test_features_of_the_next_batch_are_sent_for(pool, world_size):
    for arrived, remote in pool.run(bytes_by_batch, per_rank=parts_of(SIZES).partitions):
        ahead = [remote[0] + remote[1], *remote[2:], 0]
        assert all(0 < rows < found < rows + 20_000 for found, rows in zip(arrived[:-1], ahead, strict=False))
        assert arrived[-1] < 20_000


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
        epochs = iter(loader), iter(loader)
        batches = list(epochs[0]) if num_workers else [next(epochs[0])]
        for name, value in settings.items():
            setattr(sampler, name, value)
        if not num_workers:
            batches += epochs[0]
        found.append([describe(batch) for batch in (list(loader) if num_workers else batches[1:])])
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
    changes = [(loader, "batch_size", 2), (loader, "shuffle", True), (loader, "drop_last", True), (loader, "seed", 1)]
    for made, name, value in [*changes, (links, "exclude", "self"), (links, "negative_sampler", 2)]:
        with pytest.raises(sar.errors.ConfigError, match=f"{name} of .* cannot be changed; make another"):
            setattr(made, name, value)
    found = []
    for name, value in (("fanouts", 5), ("input_node_features", ["x"]), ("fanouts", [2 + sar.rank()])):
        sampler = sar.DistNeighborSampler([2])
        next(iter(sar.DataLoader(graph, graph.node_ids(), sampler, 5)))
        setattr(sampler, name, value)
        found.append(catch_and_recover(lambda sampler=sampler: sampler.sample(graph, graph.node_ids()[:3])))
    return found


@pytest.mark.parametrize("world_size", [2])
def test_settings_that_cannot_be_changed(pool, world_size):
    for wrong, no_dictionary, unlike in pool.run(refused_settings, per_rank=parts_of(SIZES).partitions):
        assert "fanouts is 5; expected a list" in wrong.message
        assert "expected a dictionary" in no_dictionary.message
        assert unlike.kind == "DisagreementError"
        assert "[3]" in unlike.message
