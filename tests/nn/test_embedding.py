"""`DistEmbedding` and its optimizers against `torch.nn.Embedding(sparse=True)` with torch's, in float64."""

import pytest
import torch
from torch import nn

import sar
from tests.core.attempts import catch, catch_and_recover, require
from tests.parity.harness import assert_close
from tests.sampling.scenes import global_ids, parts_of, typed_parts

DIM, STEPS = 3, 5
COUNTS = {1: [11], 2: [7, 4], 3: [6, 0, 5], 4: [5, 0, 2, 6], 5: [3, 4, 5, 6, 5], 8: [3, 2, 4, 1, 5, 3, 2, 3]}
OPTIMIZERS = {
    "adam": (sar.nn.SparseAdam, torch.optim.SparseAdam, {"lr": 0.1}),
    "adam, other settings": (sar.nn.SparseAdam, torch.optim.SparseAdam, {"lr": 0.3, "betas": (0.5, 0.7), "eps": 1e-3}),
    "adagrad": (sar.nn.SparseAdagrad, torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad, other settings": (
        sar.nn.SparseAdagrad,
        torch.optim.Adagrad,
        {"lr": 0.3, "lr_decay": 0.2, "initial_accumulator_value": 0.4, "eps": 1e-3},
    ),
}


def initial(num_nodes):
    """Rows of all nodes, (N, D)."""
    return torch.randn(num_nodes, DIM, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def made(graph, ntype=None):
    """An embedding whose rows are those of `initial` at the nodes' global IDs."""
    return sar.nn.DistEmbedding(
        graph, DIM, ntype, lambda shape, dtype: initial(graph.node_ranges[-1][1])[graph.node_ids(ntype)]
    )


def batches(rank, nodes):
    """What a worker looks up in each step: repeated nodes, in step 1 nothing on worker 0, in step 2 nothing at all."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [nodes[torch.randint(len(nodes), (6,), generator=generator)] for _ in range(STEPS)]
    if rank == 0:
        drawn[1] = drawn[1][:0]
    drawn[2] = drawn[2][:0]
    return drawn


def loss_of(rows, ids):
    """Not linear, so that wrong rows give wrong gradients."""
    return (rows.tanh() * torch.sin(ids.double() + 1).unsqueeze(1)).sum() + rows.pow(3).sum() / 10


def lookups(partition, nodes, ntype, name):
    """Two lookups a step; the second is of the first's nodes in part."""
    make, _, options = OPTIMIZERS[name]
    emb = made(sar.construct_full_graph(partition), ntype)
    optimizer = make([emb], **options)
    states = []
    for ids in batches(sar.rank(), nodes):
        loss = loss_of(emb(ids), ids) + loss_of(emb(ids[:2]), ids[:2])
        with torch.no_grad():
            assert torch.equal(emb(ids[:3]), emb(ids)[:3])
        emb(ids)  # not used
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states.append(emb().detach().clone())
    return states


def dense_lookups(num_nodes, world_size, nodes, name):
    _, make, options = OPTIMIZERS[name]
    emb = nn.Embedding(num_nodes, DIM, sparse=True, _weight=initial(num_nodes))
    optimizer = make(emb.parameters(), **options)
    states = []
    for parts in zip(*(batches(rank, nodes) for rank in range(world_size)), strict=True):
        ids = torch.cat([piece for part in parts for piece in (part, part[:2])])
        optimizer.zero_grad()
        loss_of(emb(ids), ids).backward()
        optimizer.step()
        states.append(emb.weight.detach().clone())
    return states


@pytest.fixture(autouse=True)
def checked_sparse_tensors():
    """Which torch warns of, where nobody says whether it should."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lookups_of_any_nodes(pool, world_size, name):
    parts = parts_of(COUNTS[world_size])
    nodes = torch.arange(parts.num_nodes - 2)  # the last two are never used
    results = pool.run(lookups, nodes, None, name, per_rank=parts.partitions)
    expected = dense_lookups(parts.num_nodes, world_size, nodes, name)
    assert torch.equal(expected[-1][-2:], initial(parts.num_nodes)[-2:])
    for step, state in enumerate(expected):
        assert_close(torch.cat([states[step] for states in results]), state)


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_of_several_types(pool, world_size):
    parts = typed_parts(world_size)
    items = global_ids(parts, "item")
    results = pool.run(lookups, torch.cat(items), "item", "adam", per_rank=parts.partitions)
    expected = dense_lookups(23, world_size, torch.cat(items), "adam")
    for ids, states in zip(items, results, strict=True):
        assert_close(states[-1], expected[-1][ids])


class Model(nn.Module):
    """Mean over in-neighbours of learned rows, and a layer that is the same on all workers."""

    def __init__(self, emb):
        super().__init__()
        self.emb = emb
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, graph, x):
        graph.srcdata["x"] = self.linear(x).tanh()
        graph.update_all(*functions())
        return graph.dstdata["y"]


def functions():
    import dgl.function as fn

    return fn.copy_u("x", "m"), fn.mean("m", "y")


def train(model, optimizers, graph, steps, cotangent, gather):
    """Steps on all rows (`None`) or on a lookup beside them; the rows and the layer after each."""
    states = []
    for ids in steps:
        x = model.emb() if gather else model.emb(torch.arange(graph.num_nodes()))
        loss = (model(graph, x) * cotangent).sum()
        if ids is not None:
            loss = loss + loss_of(model.emb(ids), ids)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if gather:
            sar.gather_grads(model)
        for optimizer in optimizers:
            optimizer.step()
        states.append((model.emb.weight.detach().clone(), model.linear.weight.detach().clone()))
    return states


def full_graph(mine, name, mode):
    partition, cotangent = mine
    make, _, options = OPTIMIZERS[name]
    sar.Config.disable_sr = mode == 2
    graph = sar.construct_full_graph(partition)
    torch.manual_seed(sar.rank())
    model = Model(made(graph)).double()
    before = model.emb().detach().clone()
    sar.sync_params(model)
    assert torch.equal(model.emb(), before), "not worker 0's rows"
    assert [n for n, _ in model.named_parameters()] == ["linear.weight", "linear.bias"] == list(model.state_dict())
    steps = [None, None, torch.tensor([2, sar.rank()]), None]
    optimizers = [make([model.emb], **options), torch.optim.SGD(model.parameters(), lr=0.1)]
    return train(model, optimizers, graph, steps, cotangent, True)


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("name", ["adam", "adagrad, other settings"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_graph_training_beside_shared_parameters(pool, world_size, name, mode):
    """Step 2 also looks rows up; `sync_params` and `gather_grads` leave the rows alone."""
    parts = parts_of(COUNTS[world_size])
    cotangent = torch.randn(parts.num_nodes, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mine = list(zip(parts.partitions, parts.split_nodes(cotangent), strict=True))
    results = pool.run(full_graph, name, mode, per_rank=mine)

    _, make, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    emb = nn.Embedding(parts.num_nodes, DIM, sparse=True, _weight=initial(parts.num_nodes))
    torch.manual_seed(0)
    torch.randint(2**62, ())  # what DistEmbedding draws its seed from
    model = Model(emb)
    model.linear.double()
    extra = torch.tensor([i for rank in range(world_size) for i in (2, rank)])
    optimizers = [make(emb.parameters(), **options), torch.optim.SGD(model.linear.parameters(), lr=0.1)]
    expected = train(model, optimizers, parts.reference(), [None, None, extra, None], cotangent, False)
    for step, (rows, weight) in enumerate(expected):
        assert_close(torch.cat([states[step][0] for states in results]), rows)
        assert all(torch.equal(states[step][1], results[0][step][1]) for states in results)
        assert_close(results[0][step][1], weight)


def fresh_rows(partition):
    torch.manual_seed(1)
    graph = sar.construct_full_graph(partition)
    emb = sar.nn.DistEmbedding(graph, 64)
    zeros = sar.nn.DistEmbedding(graph, 2, init_func=lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    return emb().detach(), torch.rand(()), zeros().detach(), str(emb)


@pytest.mark.parametrize("world_size", [2])
def test_rows_begin_different_on_each_worker(pool):
    parts = parts_of([9, 9])
    (first, draw, zeros, text), (second, other_draw, _, _) = pool.run(fresh_rows, per_rank=parts.partitions)
    assert not torch.isin(first, second).any()
    assert abs(torch.cat([first, second]).std().item() - 1) < 0.1
    assert torch.equal(draw, other_draw), "the generator goes on alike on all workers"
    assert torch.equal(zeros, torch.zeros(9, 2))
    assert "18, 64" in text


def unused(partition):
    """Steps without a backward anywhere, on one worker only, and with a schedule of rates."""
    emb = made(sar.construct_full_graph(partition))
    optimizer = sar.nn.SparseAdagrad([emb], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = emb().detach().clone()
    ids = torch.tensor([0, 9])
    emb(ids)
    optimizer.step()
    assert torch.equal(emb(), before)
    assert "step" not in optimizer.state[emb.weight]
    schedule.step()
    rows = emb(ids)
    if sar.rank() == 0:
        rows.sum().backward()
    optimizer.step()
    changed = (emb().detach() - before).clone()
    optimizer.zero_grad()
    optimizer.step()
    return changed, optimizer.state[emb.weight]["step"], bool(torch.equal(emb().detach() - before, changed))


@pytest.mark.parametrize("world_size", [2])
def test_a_backward_on_one_worker_only(pool):
    parts = parts_of([7, 4])
    results = pool.run(unused, per_rank=parts.partitions)
    expected = torch.zeros(11, DIM, dtype=torch.float64)
    expected[[0, 9]] = -0.5  # Adagrad's first step is the rate
    assert_close(torch.cat([changed for changed, _, _ in results]), expected)
    assert [step for _, step, _ in results] == [1, 1]
    assert all(rested for _, _, rested in results)


# -- what is refused


def attempt(partition, ids, ntype):
    graph = sar.construct_full_graph(partition)
    emb = made(graph, ntype)
    good = graph.node_ids(ntype)[:1]
    failure = catch_and_recover(emb, ids if sar.rank() == 1 else good)
    return failure, torch.equal(emb(good), emb()[:1])


@pytest.mark.parametrize(
    "ids, words",
    [([3, -1], "-1"), ([23], "such as 23"), ([0], "not of the type"), ([0.5], "float32"), ([[1]], "(1, 1)")],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2])
def test_wrong_ids_on_one_worker_are_an_error_on_all(pool, ids, words):
    parts = typed_parts(2)
    assert 0 in global_ids(parts, "item")[0]
    for failure, works_on in pool.run(attempt, torch.tensor(ids), "user", per_rank=parts.partitions):
        assert "SarError" in require(failure).bases
        assert words in failure.message
        assert works_on


def other_calls(partition):
    graph = sar.construct_full_graph(partition)
    emb = made(graph)
    return [
        catch_and_recover(sar.nn.DistEmbedding, graph, 3 + sar.rank()),
        catch(emb, torch.tensor([1])) if sar.rank() else catch(sar.nn.SparseAdam([emb]).step),
    ]


@pytest.mark.parametrize("world_size", [2])
def test_workers_that_do_different_things(pool):
    parts = parts_of([7, 4])
    for failures in pool.run(other_calls, per_rank=parts.partitions):
        assert [require(failure).kind for failure in failures] == ["DisagreementError"] * 2


def wrong_arguments(partition):
    graph = sar.construct_full_graph(partition)
    emb = made(graph)
    [block] = sar.construct_mfgs(partition, torch.arange(2), 1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(emb().sum()).backward()
    return [
        catch(sar.nn.DistEmbedding, block, 3),
        catch(lambda: sar.nn.DistEmbedding(graph, 3, init_func=lambda shape, dtype: torch.zeros(2, 2))),
        catch(scaler.step, sar.nn.SparseAdam([emb])),
    ]


@pytest.mark.parametrize("world_size", [1])
def test_wrong_arguments(pool):
    [failures] = pool.run(wrong_arguments, per_rank=parts_of([7]).partitions)
    words = ["flow graph", "init_func", "GradScaler"]
    for failure, word in zip(failures, words, strict=True):
        assert "SarError" in require(failure).bases
        assert word in failure.message


def gradients(partition, dtype, again):
    """Of this worker's rows, where every worker looks one up 600 times; `again`, of the second backward of a graph."""
    graph = sar.construct_full_graph(partition)
    emb = sar.nn.DistEmbedding(graph, DIM, dtype=dtype)
    optimizer = sar.nn.SparseAdam([emb])
    loss = emb(torch.full((600,), 1)).sum(dtype=torch.float64)
    if again:
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
    loss.backward()
    rows, grads = emb.sum_gradients()
    return torch.zeros(len(emb.weight), DIM).index_copy(0, rows, grads.float())


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_rows_looked_up_often(pool, world_size, dtype, again):
    """In bfloat16 256 + 1 is 256; what was forgotten does not come back with a graph that is retained."""
    parts = parts_of(COUNTS[world_size])
    expected = torch.zeros(parts.num_nodes, DIM)
    expected[1] = 600 * world_size
    assert_close(torch.cat(pool.run(gradients, dtype, again, per_rank=parts.partitions)), expected.to(dtype).float())
