"""`DistEmbedding.save` and `load`: the same rows by their nodes, on other partitionings and numbers of workers."""

import json
import os
import shutil
import zlib

import pytest
import torch

import sar
from sar.data import versions
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


def names_of(partition, by_original):
    """Options of `save` and `load`; without any, the graph's own original IDs are taken."""
    return {"node_ids": partition.node_features["orig_id"]} if by_original else {}


def save(partition, folder, by_original, with_optimizer):
    emb, optimizer = trained(partition)
    options = names_of(partition, by_original)
    emb.save(folder, optimizer=optimizer if with_optimizer else None, **options)
    after = trained(partition)[0]
    after.load(folder, **options)
    assert torch.equal(after(), emb())
    step(emb, optimizer, emb.node_ids[:1])
    return partition.node_features["orig_id"], after().detach(), optimizer.state[emb.weight], emb().detach()


def load(mine, folder, by_original):
    """Rows and state as loaded, and the rows after one more step at the nodes with global IDs `then`."""
    partition, then = mine
    emb = sar.nn.DistEmbedding(sar.construct_full_graph(partition), DIM, dtype=torch.float64)
    optimizer = sar.nn.SparseAdam([emb], lr=0.1)
    emb.load(folder, optimizer=optimizer, **names_of(partition, by_original))
    rows, state = emb().detach().clone(), optimizer.state[emb.weight]["step"]
    step(emb, optimizer, then)
    return partition.node_features["orig_id"], rows, state, emb().detach()


def by_node(pieces):
    """(IDs, rows) of all workers in the order of the IDs."""
    ids, rows = (torch.cat(columns) for columns in zip(*pieces, strict=True))
    return rows[ids.argsort()]


def rewrite(folder, change):
    """Make other files of the one version, by a function from the workers' contents to others, with a true manifest."""
    [path] = folder.glob("step-*")
    manifest = json.loads((path / versions.MANIFEST).read_text())
    says = json.loads(manifest["text"])
    parts = [torch.load(path / versions.part_name(rank), weights_only=True) for rank in range(says["world_size"])]
    parts = change(parts)
    says["world_size"] = len(parts)
    says["files"] = {name: value for name, value in says["files"].items() if name == versions.SHARED}
    for rank, part in enumerate(parts):
        torch.save(part, path / versions.part_name(rank))
        says["files"][versions.part_name(rank)] = versions._size_and_sum(path / versions.part_name(rank))
    text = json.dumps(says)
    (path / versions.MANIFEST).write_text(json.dumps({"sum": zlib.crc32(text.encode()), "text": text}))


def rows_of(part):
    return part["rows"]["0"]


def spread(num_workers):
    """Divide the saved rows as if so many workers had saved them."""

    def change(parts):
        ids = torch.cat([rows_of(part)["node_ids"] for part in parts])
        columns = {n: torch.cat([rows_of(part)["columns"][n] for part in parts]) for n in rows_of(parts[0])["columns"]}
        shares = []
        for rank in range(num_workers):
            share = {name: column[rank::num_workers].clone() for name, column in columns.items()}
            mine = {"node_ids": ids[rank::num_workers].clone(), "columns": share}
            shares.append({"rows": {"0": {**rows_of(parts[0]), **mine}}})
        return shares

    return change


@pytest.mark.parametrize("savers, by_original", [(1, True), (2, False), (5, True)])
@pytest.mark.parametrize("world_size", [2])
def test_other_partitionings_and_numbers_of_workers(pool, tmp_path, savers, by_original):
    """Training goes on as it would have gone on with the old partitioning."""
    folder = tmp_path / "new" / "embedding"
    saved = pool.run(save, folder, by_original, True, per_rank=cut(1, 2))
    rewrite(folder, spread(savers))
    partitions = cut(2, 2)
    # The nodes of the step that followed `save`, under their new global IDs.
    firsts = torch.cat([original[:1] for original, *_ in saved])
    new_id = torch.cat([p.node_features["orig_id"] for p in partitions]).argsort()
    then = [new_id[firsts[:1]], new_id[firsts[1:]]]
    loaded = pool.run(load, folder, by_original, per_rank=list(zip(partitions, then, strict=True)))
    assert torch.equal(*(by_node([(ids, rows) for ids, rows, *_ in pieces]) for pieces in (loaded, saved)))
    assert torch.allclose(*(by_node([(ids, rows) for ids, *_, rows in pieces]) for pieces in (loaded, saved)))
    assert [state for _, _, state, _ in loaded] == [2, 2]


def without_names(partition, folder, saves):
    del partition.node_features["orig_id"]
    emb, _ = trained(partition)
    if saves:
        emb.save(folder)
    return catch(emb.load, folder)


@pytest.mark.parametrize("world_size", [2])
def test_global_ids_serve_for_one_partitioning_only(pool, tmp_path):
    assert pool.run(without_names, tmp_path, True, per_rank=cut(1, 2)) == [None] * 2
    for failure in pool.run(without_names, tmp_path, False, per_rank=cut(2, 2)):
        assert "Global IDs serve for one partitioning only" in require(failure).message


class Trap:
    """Ends the process where it is unpickled."""

    def __reduce__(self):
        return os.abort, ()


def changed(change):
    """Change the rows that worker 1 has saved."""
    return lambda folder: rewrite(
        folder, lambda parts: [parts[0], {"rows": {"0": rows_of(parts[1]) | change(rows_of(parts[1]))}}]
    )


def one_damaged(folder):
    file = next(folder.glob("*/worker-1.pt"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")


DAMAGES = {
    "nothing": (shutil.rmtree, "has no rows"),
    "one missing": (lambda folder: next(folder.glob("*/worker-1.pt")).unlink(), "no whole checkpoint"),
    "one damaged": (one_damaged, "no whole checkpoint"),
    "no manifest": (lambda folder: next(folder.glob("*/manifest.json")).unlink(), "no whole checkpoint"),
    "wider": (changed(lambda of: {"columns": {n: c.repeat(1, 2) for n, c in of["columns"].items()}}), "expected"),
    "without state": (changed(lambda of: {"columns": {"weight": of["columns"]["weight"]}}), "optimizer"),
    "other names": (changed(lambda of: {"node_ids": of["node_ids"] + 100}), "are not in"),
    "trapped": (lambda folder: rewrite(folder, lambda parts: [parts[0], Trap()]), "cannot be read"),
}
"""Changes of the saved files, and words of the error."""


def attempt(partition, folder, damage):
    emb, optimizer = trained(partition)
    original = partition.node_features["orig_id"]
    emb.save(folder, node_ids=original, optimizer=optimizer)
    sar.comm.all_reduce(torch.zeros(1))
    if sar.rank() == 0:
        DAMAGES[damage][0](folder)
    sar.comm.all_reduce(torch.zeros(1))
    before = emb().detach().clone()
    failure = catch_and_recover(lambda: emb.load(folder, node_ids=original, optimizer=optimizer))
    emb.save(folder, node_ids=original)
    return failure, torch.equal(emb(), before)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("world_size", [2])
def test_files_that_cannot_be_read_are_an_error_on_all(pool, tmp_path, damage):
    for failure, unchanged in pool.run(attempt, tmp_path, damage, per_rank=cut(1, 2)):
        assert "SarError" in require(failure).bases
        assert DAMAGES[damage][1] in failure.message, failure.message
        assert unchanged
