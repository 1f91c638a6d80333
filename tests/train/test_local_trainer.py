"""`LocalTrainer`: averages by arithmetic and beside DGL, for more and for fewer partitions than workers."""

import contextlib
import copy
import itertools

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch
from torch import nn
from torch.nn import functional

import sar
from tests.adapters.dgl.directories import heterogeneous_graph, homogeneous_graph, write_directory
from tests.parity.harness import assert_close
from tests.workers import shared_pool

COUNTS = [3, 0, 8, 1, 5]
"""Training nodes of made-up partitions."""


class Odd(nn.Module):
    """Running statistics, a counter, a switch, a shared weight, a frozen and a complex one."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
        self.norm = nn.BatchNorm1d(3, dtype=dtype)
        self.first_too = self.first
        self.frozen = nn.Parameter(torch.randn(2, dtype=dtype), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(2, dtype=torch.complex64 if dtype == torch.float32 else torch.complex128))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("lowest", torch.full((2,), -torch.inf, dtype=dtype))

    def forward(self, x):
        self.seen = self.seen | (x.sum() > 0)  # another tensor, as some modules do it
        x = self.first_too(self.norm(self.first(x)))
        return (self.last(x) + self.frozen) * (self.turn * self.turn.conj()).real


def made(dtype):
    torch.manual_seed(0)
    return Odd(dtype)


def rows(number, dtype):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def optimizer_of(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.1)


def trains(model):
    def train_one(part, optimizer):
        for batch in part.split(2):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()

    return train_one


def train_made_up(counts, dtype, plan):
    own = range(sar.rank(), len(counts), sar.world_size())
    torch.manual_seed(sar.rank() + 5)
    model = Odd(dtype)
    if sar.rank() == 0:
        model = made(dtype)
    parts, mine = [rows(i, dtype) for i in own], [counts[i] for i in own]
    trainer = sar.train.LocalTrainer(model, optimizer_of, parts, mine)
    for epochs in plan:
        trainer.train_round(trains(model), epochs)
    return model.state_dict()


def expected(counts, dtype, plan):
    """The same, in one process and word by word: (1 / n) sum_i n_i w_i in float64, the greatest of other numbers."""
    model, optimizers, copies = made(dtype), {}, {}
    for epochs in plan:
        for i, count in enumerate(counts):
            if count:
                copies[i] = copies.get(i, copy.deepcopy(model))
                copies[i].load_state_dict(model.state_dict())
                optimizers[i] = optimizers.get(i, optimizer_of(copies[i].parameters()))
                for _ in range(epochs):
                    trains(copies[i])(rows(i, dtype), optimizers[i])
        states = [(counts[i] / sum(counts), one.state_dict()) for i, one in copies.items()]
        average = {}
        for name, value in model.state_dict().items():
            if value.is_floating_point() or value.is_complex():
                wide = torch.promote_types(value.dtype, torch.float64)
                average[name] = sum(share * state[name].to(wide) for share, state in states).to(value.dtype)
            else:
                average[name] = torch.stack([state[name].long() for _, state in states]).amax(0).to(value.dtype)
        model.load_state_dict(average)
    return model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("counts", [COUNTS, [2, 7]], ids=["more or as many", "fewer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_averages(pool, world_size, counts, dtype):
    plan = [1, 3, 1]
    found, wanted = pool.run(train_made_up, counts, dtype, plan), expected(counts, dtype, plan)
    for state in found:
        assert state.keys() == wanted.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0)
            assert torch.equal(value, found[0][name])
    assert int(wanted["norm.num_batches_tracked"]) == 2 * sum(plan)
    assert bool(wanted["seen"])


def with_fields(graph):
    """Every node's own ID as a feature, so that a subgraph can be compared with the graph; edges' likewise."""
    random = torch.Generator().manual_seed(2)
    for ntype in graph.ntypes:
        nodes = graph.num_nodes(ntype)
        graph.nodes[ntype].data.clear()
        graph.nodes[ntype].data["id"] = torch.arange(nodes)
        graph.nodes[ntype].data["x"] = torch.randn(nodes, 4, generator=random, dtype=torch.float64)
    for etype in graph.canonical_etypes:
        graph.edges[etype].data.clear()
        graph.edges[etype].data["id"] = torch.arange(graph.num_edges(etype))
        graph.edges[etype].data["odd"] = torch.arange(graph.num_edges(etype)) % 2 == 1
    target = graph.nodes[graph.ntypes[-1]].data
    target["label"] = torch.randint(3, (len(target["id"]),), generator=random)
    target["train_mask"] = torch.rand(len(target["id"]), generator=random) < 0.4
    return graph


def load(path, parts, **options):
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu", parts=parts)
    graph = sar.construct_full_graph(data)
    return graph, data, sar.train.local_subgraphs(graph, data, **options)


def cyclic(num_parts, world_size):
    return [list(range(rank, num_parts, world_size)) for rank in range(world_size)]


def subgraphs(parts, path, both_ends):
    """The nodes and edges of each, with their fields."""
    _, _, found = load(path, parts, both_ends=both_ends)
    return [
        (
            {ntype: dict(part.nodes[ntype].data) for ntype in part.ntypes},
            {e: (*part.edges(etype=e, order="eid"), dict(part.edges[e].data)) for e in part.canonical_etypes},
        )
        for part in found
    ]


@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous"])
@pytest.mark.parametrize(
    "num_parts, world_size, dealt", [(3, 1, False), (3, 2, True), (2, 2, False), (2, 3, True), (1, 3, False)]
)
@pytest.mark.parametrize("both_ends", [True, False])
def test_subgraphs(pool, tmp_path, name, num_parts, world_size, dealt, both_ends):
    """Own nodes and one hop, whatever the number of partitions; every own node in one of them, and every edge at it."""
    graph = with_fields({"homogeneous": homogeneous_graph, "heterogeneous": heterogeneous_graph}[name]())
    path = str(write_directory(tmp_path, graph, num_parts).path)
    parts = cyclic(num_parts, world_size) if dealt else [None] * world_size
    by_worker = pool.run(subgraphs, path, both_ends, per_rank=parts)
    own = {ntype: [] for ntype in graph.ntypes}
    for nodes, edges in itertools.chain(*by_worker):
        owned = {ntype: fields["id"][fields["inner_node"]] for ntype, fields in nodes.items()}
        for etype, (src, dst, fields) in edges.items():
            ids = fields["id"]
            ends = graph.find_edges(ids, etype=etype)
            assert torch.equal(nodes[etype[0]]["id"][src], ends[0])
            assert torch.equal(nodes[etype[2]]["id"][dst], ends[1])
            assert torch.equal(fields["odd"], ids % 2 == 1)
            into = graph.in_edges(owned[etype[2]], form="eid", etype=etype)
            out = graph.out_edges(owned[etype[0]], form="eid", etype=etype)
            expected = torch.cat([into, out]).unique() if both_ends else into
            assert ids.sort().values.tolist() == expected.sort().values.tolist()
            assert torch.isin(ids[: len(into)], into).all(), "edges into the partition come first"
        for ntype, fields in nodes.items():
            ids, whole = fields["id"], graph.nodes[ntype].data
            own[ntype] += owned[ntype].tolist()
            assert torch.equal(ids[: len(owned[ntype])], owned[ntype]), "own nodes come first"
            assert len(ids.unique()) == len(ids)
            for key in whole:
                rows = whole[key][ids]
                assert torch.equal(fields[key], rows & fields["inner_node"] if key == "train_mask" else rows)
    assert {ntype: sorted(ids) for ntype, ids in own.items()} == {t: list(range(graph.num_nodes(t))) for t in own}
    if dealt:
        assert [len(found) for found in by_worker] == [max(len(mine), 1) for mine in parts]


def one_layer():
    """Exact on a subgraph: one hop is all that it sees."""
    torch.manual_seed(3)
    return dglnn.SAGEConv(4, 3, "mean").double()


def train_dgl(graph, model, optimizer):
    train = graph.ndata["train_mask"]
    logits = model(graph, graph.ndata["x"])
    loss = functional.cross_entropy(logits[train], graph.ndata["label"][train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def train_one_layer(parts, path):
    graph, data, found = load(path, parts)
    model = one_layer()
    trainer = sar.train.LocalTrainer(model, sgd, found)
    before = sar.comm.statistics().bytes_received
    for _ in range(4):
        trainer.train_round(lambda part, optimizer: train_dgl(part, model, optimizer))
    received = sar.comm.statistics().bytes_received - before
    with torch.no_grad():
        logits = model(graph, data.node_features["_N/x"])  # collective, and the models are one again
    return [p.detach() for p in model.parameters()], data.node_features["_N/id"], logits, received


@pytest.mark.parametrize("num_parts, world_size, dealt", [(3, 1, True), (5, 2, False), (2, 3, True), (1, 3, False)])
def test_one_layer_and_sgd_are_exact(pool, tmp_path, num_parts, world_size, dealt):
    """The mean of gradients over partitions, by training nodes, is that over the graph: as DGL on one machine."""
    graph = with_fields(homogeneous_graph())
    directory = write_directory(tmp_path, graph, num_parts)
    parts = cyclic(num_parts, world_size) if dealt else [None] * world_size
    by_worker = pool.run(train_one_layer, str(directory.path), per_rank=parts)
    model = one_layer()
    optimizer = sgd(model.parameters())
    for _ in range(4):
        train_dgl(graph, model, optimizer)
    logits = model(graph, graph.ndata["x"]).detach()
    sent = sum(p.numel() * 8 for p in model.parameters())
    for parameters, ids, own, received in by_worker:
        for mine, wanted in zip(parameters, model.parameters(), strict=True):
            assert_close(mine, wanted, 1e-12)
        assert_close(own, logits[ids], 1e-12)
        assert received <= 4 * (sent + 8 * 3 * 24 * world_size), "no features travel in a round"


def go_on_exactly(forgotten, path):
    """Rounds with Adam, then steps on the whole graph, whose gradients are summed, or not."""
    graph, data, found = load(path, None)
    model = one_layer()
    trainer = sar.train.LocalTrainer(model, optimizer_of, found)
    losses = []
    for _ in range(2):
        trainer.train_round(lambda part, optimizer: train_dgl(part, model, optimizer))
        optimizer = optimizer_of(model.parameters())
        for _ in range(2):
            logits = model(graph, data.node_features["_N/x"])
            optimizer.zero_grad()
            logits.square().sum().backward()
            if not forgotten:
                sar.gather_grads(model)
            optimizer.step()
            losses.append(logits.square().sum().item())
    return losses


@pytest.mark.parametrize("world_size", [2])
def test_models_are_compared_outside_of_rounds_only(pool, tmp_path):
    path = str(write_directory(tmp_path, with_fields(homogeneous_graph()), 2).path)
    pool.run(go_on_exactly, False, path)
    outcomes = pool.outcomes(go_on_exactly, True, path)
    assert [outcome.kind for outcome in outcomes] == ["DisagreementError"] * 2
    assert "gather_grads" in outcomes[0].message


class Interrupted:
    """Local training with Adam and dropout."""

    def __init__(self, path):
        _, _, parts = load(path, range(sar.rank(), 3, sar.world_size()))
        self.model = dglnn.SAGEConv(4, 3, "mean", feat_drop=0.3).double()
        self.trainer = sar.train.LocalTrainer(self.model, optimizer_of, parts)

    def run(self, rounds):
        for _ in range(rounds):
            self.trainer.train_round(lambda part, optimizer: train_dgl(part, self.model, optimizer))
        return self.model.state_dict(), self.trainer.state_dict()


def undisturbed(path, folder):
    torch.manual_seed(4)
    training = Interrupted(path)
    training.run(2)
    sar.save_checkpoint(folder, model=training.model, loaders=training.trainer, step=2)
    return training.run(2)


def resumed(path, folder, rounds):
    training = Interrupted(path)
    assert sar.load_checkpoint(folder, model=training.model, loaders=training.trainer)["step"] == 2
    return training.run(rounds)


@pytest.mark.parametrize("world_size", [2])
def test_training_goes_on_bit_for_bit(pool, tmp_path):
    """With other workers, whose partitions are others, the optimizers begin anew."""
    path = str(write_directory(tmp_path / "parts", with_fields(homogeneous_graph()), 3).path)
    expected = pool.run(undisturbed, path, tmp_path / "saved")
    found = pool.run(resumed, path, tmp_path / "saved", 2)
    for (model, state), (found_model, found_state) in zip(expected, found, strict=True):
        assert all(torch.equal(value, found_model[name]) for name, value in model.items())
        assert str(state) == str(found_state)
    assert [len(state["optimizers"]) for _, state in found] == [2, 1]
    [(_, state)] = shared_pool(1).run(resumed, path, tmp_path / "saved", 0)
    assert [len(one["state"]) for one in state["optimizers"]] == [0, 0, 0]


def misuse(mistake):
    sar.comm.all_reduce(torch.ones(1))  # a virtual worker does not begin where another has ended with an error
    model, parts, epochs, train_one = nn.Linear(2, 2), [1, 2], 1, lambda part, optimizer: None
    counts = {"no training nodes": [0, 0], "too few counts": [1]}.get(mistake, [1, 2])
    if mistake == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif mistake == "no mask":
        parts, counts = [dgl.rand_graph(3, 3)], None
    elif sar.rank() == 1:
        epochs = 2 if mistake == "epochs" else 1
        if mistake == "raises":
            train_one = lambda part, optimizer: 1 / 0  # noqa: E731
        elif mistake == "distributed":
            train_one = lambda part, optimizer: sar.comm.all_reduce(torch.ones(1))  # noqa: E731
    sar.train.LocalTrainer(model, sgd, parts, counts).train_round(train_one, epochs)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    "mistake, kinds, words",
    [
        ("too few counts", ["ConfigError"] * 2, "counts is"),
        ("no training nodes", ["ConfigError"] * 2, "training nodes"),
        pytest.param(
            *("DDP", ["ConfigError"] * 2, "DistributedDataParallel"),
            marks=pytest.mark.processes("virtual workers refuse DistributedDataParallel"),
        ),
        ("no mask", ["ConfigError"] * 2, "pass counts"),
        ("raises", ["PeerError", "ZeroDivisionError"], "Worker 1 raised ZeroDivisionError"),
        ("distributed", ["DisagreementError"] * 2, "not in the same distributed call"),
        ("epochs", ["DisagreementError"] * 2, "a round of 2 epochs"),
    ],
)
def test_mistakes(pool, mistake, kinds, words):
    outcomes = pool.outcomes(misuse, mistake)
    assert [outcome.kind for outcome in outcomes] == kinds
    assert words in outcomes[0].message


def model_after_an_error():
    model = nn.Linear(2, 2)
    trainer = sar.train.LocalTrainer(model, sgd, [1, 2], [1, 2])
    before = model.weight.detach().clone()

    def train_one(part, optimizer):
        with torch.no_grad():
            model.weight += part + sar.rank()
        if part == 2 and sar.rank() == 1:
            raise ValueError("on purpose")

    with contextlib.suppress(ValueError, sar.SarError):
        trainer.train_round(train_one)
    changed = not torch.equal(model.weight, before)
    sar.recover()
    trainer.train_round(lambda part, optimizer: None)
    return changed, before, model.weight.detach()


@pytest.mark.parametrize("world_size", [2])
def test_after_an_error_the_model_is_that_before_the_round(pool):
    for changed, before, after in pool.run(model_after_an_error):
        assert not changed
        assert torch.equal(after, before)
