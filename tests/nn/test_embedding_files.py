"""`DistEmbedding.save` and `load`: the same rows by their nodes, on other partitionings and numbers of workers."""

import os

import pytest
import torch

import sar
from tests.core.attempts import catch, catch_and_recover, require
from tests.graphs import partition_in_memory, random_graph

NODES, DIM = 12, 3
EDGES = random_graph(0, NODES, 30)


def cut(number, num_partitions):
    """One of several partitionings; all have the same original IDs."""
    assignment = torch.randint(num_partitions, (NODES,), generator=torch.Generator().manual_seed(number))
    return partition_in_memory(EDGES, assignment, num_partitions).partitions


def trained(partition, lr=0.1):
    """An embedding after two steps in which only some rows were used, and its optimizer."""
    emb = sar.nn.DistEmbedding(sar.construct_full_graph(partition), DIM, dtype=torch.float64)
    optimizer = sar.nn.SparseAdam([emb], lr=lr)
    for ids in (torch.tensor([1, 5]), torch.tensor([5, 11])):
        step(emb, optimizer, ids)
    return emb, optimizer


def step(emb, optimizer, ids):
    optimizer.zero_grad()
    emb(ids).pow(2).sum().backward()
    optimizer.step()


def save(partition, folder, by_original, with_optimizer):
    emb, optimizer = trained(partition)
    original = partition.node_features["orig_id"]
    options = {"node_ids": original} if by_original else {}
    emb.save(folder, optimizer=optimizer if with_optimizer else None, **options)
    after = trained(partition)[0]
    after.load(folder, **options)
    assert torch.equal(after(), emb())
    step(emb, optimizer, emb.node_ids[:1])
    return original, after().detach(), optimizer.state[emb.weight], emb().detach()


def load(partition, folder, with_optimizer, then):
    """Rows and state as loaded, and the rows after one more step at the nodes with global IDs `then`."""
    emb = sar.nn.DistEmbedding(sar.construct_full_graph(partition), DIM, dtype=torch.float64)
    optimizer = sar.nn.SparseAdam([emb], lr=0.1)
    original = partition.node_features["orig_id"]
    emb.load(folder, node_ids=original, optimizer=optimizer if with_optimizer else None)
    rows, state = emb().detach().clone(), optimizer.state[emb.weight].get("step")
    step(emb, optimizer, then)
    return original, rows, state, emb().detach()


def by_node(pieces):
    """(IDs, rows) of all workers in the order of the IDs."""
    ids, rows = (torch.cat(columns) for columns in zip(*pieces, strict=True))
    return rows[ids.argsort()]


def spread(folder, num_workers):
    """Divide the saved rows as if so many workers had saved them."""
    files = sorted(folder.glob("part-*.pt"))
    parts = [torch.load(file, weights_only=True) for file in files]
    ids = torch.cat([part["node_ids"] for part in parts])
    columns = {name: torch.cat([part["columns"][name] for part in parts]) for name in parts[0]["columns"]}
    for file in files:
        file.unlink()
    for rank in range(num_workers):
        share = {name: column[rank::num_workers].clone() for name, column in columns.items()}
        part = {**parts[0], "node_ids": ids[rank::num_workers].clone(), "columns": share}
        torch.save(part, folder / f"part-{rank}-of-{num_workers}.pt")


@pytest.mark.parametrize("savers", [1, 2, 5])
@pytest.mark.parametrize("world_size", [2])
def test_other_partitionings_and_numbers_of_workers(pool, world_size, tmp_path, savers):
    """Training goes on as it would have gone on with the old partitioning."""
    folder = tmp_path / "new" / "embedding"
    saved = pool.run(save, folder, True, True, per_rank=cut(1, 2))
    spread(folder, savers)
    partitions = cut(2, 2)
    # The nodes of the step that followed `save`, under their new global IDs.
    firsts = torch.cat([original[:1] for original, *_ in saved])
    new_id = torch.cat([p.node_features["orig_id"] for p in partitions]).argsort()
    then = [new_id[firsts[:1]], new_id[firsts[1:]]]
    loaded = pool.run(load_case, folder, per_rank=list(zip(partitions, then, strict=True)))
    assert torch.equal(*(by_node([(ids, rows) for ids, rows, *_ in pieces]) for pieces in (loaded, saved)))
    assert torch.allclose(*(by_node([(ids, rows) for ids, *_, rows in pieces]) for pieces in (loaded, saved)))
    assert [state for _, _, state, _ in loaded] == [2, 2]


def load_case(mine, folder):
    partition, then = mine
    return load(partition, folder, True, then)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_partitioning_needs_no_names(pool, world_size, tmp_path):
    """And an earlier set of files is removed, also one of another number of workers."""
    (tmp_path / "part-0-of-7.pt").write_bytes(b"of an earlier time")
    for _ in range(2):
        pool.run(save, tmp_path, False, False, per_rank=cut(1, world_size))
        names = sorted(file.name for file in tmp_path.iterdir())
        assert names == [f"part-{rank}-of-{world_size}.pt" for rank in range(world_size)]


def nothing(folder):
    for file in folder.iterdir():
        file.unlink()


def one_missing(folder):
    (folder / "part-1-of-2.pt").unlink()


def one_damaged(folder):
    file = folder / "part-1-of-2.pt"
    file.write_bytes(file.read_bytes()[:100])


def two_sets(folder):
    (folder / "part-0-of-3.pt").write_bytes((folder / "part-0-of-2.pt").read_bytes())


def of_two_saves(folder):
    rewrite(folder, lambda part: part | {"save": 1})


def wider(folder):
    rewrite(folder, lambda part: part | {"columns": {n: c.repeat(1, 2) for n, c in part["columns"].items()}})


def without_state(folder):
    rewrite(folder, lambda part: part | {"columns": {"weight": part["columns"]["weight"]}})


def other_names(folder):
    rewrite(folder, lambda part: part | {"node_ids": part["node_ids"] + 100})


def rewrite(folder, change):
    file = folder / "part-1-of-2.pt"
    torch.save(change(torch.load(file, weights_only=True)), file)


class Trap:
    """Ends the process where it is unpickled."""

    def __reduce__(self):
        return os._exit, (3,)


def trapped(folder):
    torch.save({"save": Trap()}, folder / "part-1-of-2.pt")


def attempt(partition, folder, damage):
    emb, optimizer = trained(partition)
    original = partition.node_features["orig_id"]
    emb.save(folder, node_ids=original, optimizer=optimizer)
    sar.comm.all_reduce(torch.zeros(1))
    if sar.rank() == 0:
        damage(folder)
    sar.comm.all_reduce(torch.zeros(1))
    before = emb().detach().clone()
    failure = catch_and_recover(lambda: emb.load(folder, node_ids=original, optimizer=optimizer))
    emb.save(folder, node_ids=original)
    return failure, torch.equal(emb(), before)


@pytest.mark.parametrize(
    "damage, words",
    [
        (nothing, "expected part-RANK-of-W.pt"),
        (one_missing, "are in none of"),
        (one_damaged, "damaged"),
        (two_sets, "remove one"),
        (of_two_saves, "different saves"),
        (wider, "expected"),
        (without_state, "optimizer"),
        (other_names, "are in none of"),
        (trapped, "damaged"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_files_that_cannot_be_read_are_an_error_on_all(pool, world_size, tmp_path, damage, words):
    for failure, unchanged in pool.run(attempt, tmp_path, damage, per_rank=cut(1, 2)):
        assert "SarError" in require(failure).bases
        assert words in failure.message, failure.message
        assert unchanged


def save_in_the_way(partition, folder):
    emb, _ = trained(partition)
    return [catch_and_recover(emb.save, folder), catch(lambda: emb.save(folder, node_ids=torch.arange(99)))]


@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_saved_is_an_error_on_all(pool, world_size, tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    for failures in pool.run(save_in_the_way, tmp_path / "file" / "x", per_rank=cut(1, 2)):
        assert all("SarError" in require(failure).bases for failure in failures)
        assert "could not be written" in failures[0].message
        assert "node_ids" in failures[1].message
