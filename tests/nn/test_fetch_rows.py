"""`fetch_rows` and `global_ids` against indexing whole tensors: values, gradients, types, and what is refused."""

import pytest
import torch

import sar
from tests.core.attempts import catch, catch_and_recover, require
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import assert_close
from tests.sampling.scenes import global_ids, parts_of, typed_parts

COUNTS = {1: [11], 2: [7, 4], 3: [6, 0, 5], 4: [5, 0, 2, 4], 5: [3, 2, 0, 4, 2], 8: [1, 2, 0, 1, 3, 1, 2, 1]}


def drawn(rank, nodes):
    """Repeated nodes of any worker, in no order; none on worker 0 the second time."""
    generator = torch.Generator().manual_seed(rank)
    return [nodes[torch.randint(len(nodes), (9,), generator=generator)], nodes[: 3 * min(rank, 1)]]


def table(num_nodes):
    return torch.randn(num_nodes, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def loss_of(rows, ids):
    return (rows.tanh() * torch.sin(ids.double() + 1)[:, None, None]).sum() + rows.pow(3).sum()


def fetch_on_worker(partition, nodes, ntype):
    graph = sar.construct_full_graph(partition)
    own = graph.node_ids(ntype)
    x = table(graph.node_ranges[-1][1])[own].requires_grad_()
    fetched = [sar.fetch_rows(graph, x, ids, ntype) for ids in drawn(sar.rank(), nodes)]
    sum(loss_of(rows, ids) for rows, ids in zip(fetched, drawn(sar.rank(), nodes), strict=True)).backward()
    numbers = sar.fetch_rows(graph, own * 2, nodes, ntype)
    assert numbers.equal(nodes * 2)
    assert not numbers.requires_grad
    with torch.no_grad():
        assert not sar.fetch_rows(graph, x, nodes, ntype).requires_grad
    return own, x.grad, [rows.detach() for rows in fetched]


def check(by_rank, nodes, num_nodes):
    whole = table(num_nodes).requires_grad_()
    asked = [ids for rank in range(len(by_rank)) for ids in drawn(rank, nodes)]
    sum(loss_of(whole[ids], ids) for ids in asked).backward()
    found = [rows for _, _, fetched in by_rank for rows in fetched]
    for ids, rows in zip(asked, found, strict=True):
        assert rows.equal(whole.detach()[ids])
    for own, grad, _ in by_rank:
        assert_close(grad, whole.grad[own], 1e-9)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_and_gradients(pool, world_size):
    parts = parts_of(COUNTS[world_size])
    check(pool.run(fetch_on_worker, torch.arange(11), None, per_rank=parts.partitions), torch.arange(11), 11)


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_of_several_types(pool, world_size):
    parts = typed_parts(world_size)
    items = torch.cat(global_ids(parts, "item"))
    check(pool.run(fetch_on_worker, items, "item", per_rank=parts.partitions), items, 23)


def mistakes(partition, program):
    graph = sar.construct_full_graph(partition)
    return catch(program, graph, torch.zeros(len(graph.node_ids("user")), 2))


def of_another_type(graph, x):
    sar.fetch_rows(graph, x, graph.node_ids("item"), "user")


def outside(graph, x):
    sar.fetch_rows(graph, x, torch.tensor([0, 23]), "user")


def no_type(graph, x):
    sar.fetch_rows(graph, x, torch.tensor([0]))


def wrong_length(graph, x):
    sar.fetch_rows(graph, x[:-1], torch.tensor([0]), "user")


def other_widths(graph, x):
    sar.fetch_rows(graph, x[:, : 1 + sar.rank()], torch.tensor([0]), "user")


@pytest.mark.parametrize(
    "program, words",
    [
        (of_another_type, "which is not of the type 'user'"),
        (outside, "1 of the IDs, such as 23, are not of the graph's nodes; expected global IDs from 0 to 22"),
        (no_type, "several node types; name one"),
        (wrong_length, "expected 7 rows, one for each of this worker's user"),
        (other_widths, "fetch_rows of user, torch.float32"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_mistakes_reach_all_workers(pool, program, words):
    failures = pool.run(mistakes, program, per_rank=typed_parts(2).partitions)
    assert any(words in require(failure).message for failure in failures)
    assert all(failure is not None for failure in failures)


def found_on_worker(partition, ntype, count):
    """The global IDs of this worker's picks, of none, and of all nodes; and this worker's own nodes' IDs."""
    graph = sar.construct_full_graph(partition)
    picks = torch.randint(count, (2, 5), generator=torch.Generator().manual_seed(sar.rank()))
    picks = picks[:, : 5 * min(sar.rank(), 1)].int()
    found = sar.global_ids(graph, picks, ntype)
    assert (found.dtype, found.shape) == (torch.int64, picks.shape)
    return (
        picks,
        found,
        sar.global_ids(graph, torch.arange(count), ntype),
        graph.node_ids(ntype),
        graph.original_ids(ntype),
    )


def check_ids(by_rank, count):
    own, originals = (torch.cat(columns) for columns in list(zip(*by_rank, strict=True))[3:])
    expected = torch.empty(count, dtype=torch.int64).index_copy_(0, originals, own)
    for picks, found, every, _, _ in by_rank:
        assert every.equal(expected)
        assert found.equal(expected[picks.long()])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_global_ids_of_original_ones(pool, world_size):
    assignment = torch.randint(world_size, (20,), generator=torch.Generator().manual_seed(1))
    parts = partition_in_memory(random_graph(0, 20, 40), assignment, world_size)
    check_ids(pool.run(found_on_worker, None, 20, per_rank=parts.partitions), 20)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("ntype, count", [("user", 14), ("item", 9)])
def test_global_ids_of_a_type(pool, world_size, ntype, count):
    check_ids(pool.run(found_on_worker, ntype, count, per_rank=typed_parts(world_size).partitions), count)


def ids_of_nobody(partition, num_nodes):
    graph, asked = sar.construct_full_graph(partition), [3, num_nodes] if sar.rank() else [3]
    failure = catch_and_recover(sar.global_ids, graph, torch.tensor(asked))
    del partition.node_features["orig_id"]
    return failure, catch_and_recover(sar.global_ids, sar.construct_full_graph(partition), torch.tensor([3]))


@pytest.mark.parametrize("world_size", [2])
def test_original_ids_that_are_not_there(pool, world_size):
    results = pool.run(ids_of_nobody, sum(COUNTS[world_size]), per_rank=parts_of(COUNTS[world_size]).partitions)
    last = sum(COUNTS[world_size]) - 1
    assert f"The original IDs are 3 to {last + 1}; expected some of 0 to {last}" in results[1][0].message
    assert all("do not have the nodes' IDs in the input graph" in unknown.message for _, unknown in results)
