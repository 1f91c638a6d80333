"""What stays in memory of a virtual worker whose turn has passed, what lies in files, and what is read from them ahead.

What a worker loads of features is published unwritten, and changed without others' notice. Of published rows that the
system has dropped, those asked for come back, and no others.
"""

import ctypes
import os
import time

import dgl.function as fn
import pytest
import torch
from torch import nn

import sar
from sar.comm import session
from sar.outofcore.pages import Published
from sar.outofcore.residency import Residency
from sar.outofcore.spill import PAGE, Disk, SpillFile, memory_at
from sar.tensors.spillable import tensor_file
from sar.train.profile import total
from tests.adapters.dgl.directories import homogeneous_graph
from tests.graphs import partition_in_memory, random_graph
from tests.virtual.virtual_pool import VirtualPool, fill_the_heap

PLACES = 3


def anonymous():
    """Bytes of the process that are of no file."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def leaves_and_comes_back(changes):
    """What a tensor holds after turns of others, and what memory it and one that autograd has saved take meanwhile."""
    parameter, before = torch.ones((), requires_grad=True), anonymous()
    kept = torch.arange(2.0**20) + sar.rank()
    saved, numbers = kept.clone(), kept.numpy()
    product = (parameter * saved).sum()
    del saved
    sar.all_sum(0)
    taken = anonymous() - before if sar.rank() == 0 else 0  # whose turn began when nobody had anything
    if changes == "unseen, before its first use":
        numbers[5:7] = -1
    kept.sum()
    if changes == "by torch":
        kept[5:7] = -1
    if changes == "unseen":
        numbers[5:7] = -1
    product.backward()
    for _ in range(3):  # whoever has the turn writes to slots that are free now
        torch.rand(2**20)
        sar.all_sum(0)
    expected = torch.arange(2.0**20) + sar.rank()
    gradient = expected.sum()
    if changes:
        expected[5:7] = -1
    return torch.equal(kept, expected), torch.equal(parameter.grad, gradient), taken


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("changes", [None, "by torch", "unseen", "unseen, before its first use"])
def test_what_waits_is_out_of_memory(changes, fits):
    for kept, gradient, taken in VirtualPool(1, 3, fits=fits).run(leaves_and_comes_back, changes):
        assert kept
        assert gradient
        assert taken < 2**22  # of 24 MB


def zeros_leave():
    """Bytes written for zeros, and their sum after additions in other turns."""
    zeros, before = torch.zeros(2**20), residency().file.written
    sar.all_sum(0)
    written = residency().file.written - before
    zeros[3:5] += 1
    sar.all_sum(0)
    return written, zeros.sum().item()


def test_zeros_are_not_written():
    for written, value in VirtualPool(1, 3).run(zeros_leave):
        assert written < 2**20
        assert value == 2


def keeps_structure(data):
    """How many tensors a graph has kept of its structure, after its use, that are in memory where they are small."""
    graph = sar.construct_full_graph(data)
    graph.srcdata["x"] = torch.rand(graph.num_nodes(), 3, requires_grad=True)
    graph.edata["w"] = torch.rand(graph.num_edges(), 1, requires_grad=True)
    graph.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "y"))
    graph.dstdata["y"].sum().backward()
    (relation,) = graph._structure.relations
    blocks = [*relation.blocks, *(block for cut in relation._tiles.values() for block in cut.values())]
    blocks += relation._in_place.values()
    kept = [*relation.halos, *relation.plan.send_rows]
    for block in blocks:
        kept += [block.rows, block.indptr, block.cols, *(block._transposed or ())]
    kept = [one for one in kept if isinstance(one, torch.Tensor) and one.nbytes]
    assert len(kept) > 8 * sar.world_size()
    return sum(one.untyped_storage().resizable() for one in kept)


def test_structure_lies_in_files():
    graph = random_graph(0, 200, 3000)
    parts = partition_in_memory(graph, torch.arange(200) % 4, 4).partitions
    assert VirtualPool(1, 4).run(keeps_structure, per_rank=parts) == [0] * 4


# -- features in files


def residency() -> Residency:
    found = session.current_group()._transport._residency
    assert found is not None
    return found


def in_memory(tensor):
    """Whether a tensor has memory of its own, which leaves with the turn."""
    return tensor.untyped_storage().resizable()


def loads(file):
    data = sar.load_dgl_partition_data(file, sar.rank(), "cpu")
    edges = {key: torch.cat([shard.edge_features[key] for shard in data.all_shard_edges]) for key in ("w", "e/f")}
    ids = torch.cat([shard.edge_features["orig_id"] for shard in data.all_shard_edges])
    lie_in_files = [data.node_features["_N/feat"], *(data.all_shard_edges[0].edge_features[key] for key in edges)]
    assert not any(map(in_memory, lie_in_files))
    sar.all_sum(torch.ones(3))  # everything has left, and comes back
    return data.node_features["orig_id"], data.node_features["_N/feat"], ids, edges


@pytest.mark.parametrize("parts", [1, 2, PLACES, 5])
def test_features_are_what_the_files_have(tmp_path, parts):
    graph = homogeneous_graph()
    nodes, edges = sar.partition_graph(graph, "graph", parts, tmp_path / "parts", return_mapping=True)
    loaded = VirtualPool(1, PLACES).run(loads, tmp_path / "parts" / "graph.json")
    node_ids, features, edge_ids, fields = zip(*loaded, strict=True)
    assert torch.equal(torch.cat(features), graph.ndata["feat"][torch.cat(node_ids)])
    assert sorted(torch.cat(node_ids).tolist()) == sorted(nodes.tolist())
    assert sorted(torch.cat(edge_ids).tolist()) == sorted(edges.tolist())
    for key in ("w", "e/f"):
        assert torch.equal(torch.cat([one[key] for one in fields]), graph.edata[key][torch.cat(edge_ids)])


def features_of(file):
    return sar.load_dgl_partition_data(file, sar.rank(), "cpu").node_features["_N/feat"]


def is_published_as_it_is(file):
    features, here = features_of(file), residency()
    written = here.file.written
    published = [here.publish(rows) for rows in (features, features[2:5], features[:, :2].t())]
    assert here.file.written == written + published[2].rows.nbytes  # which does not lie so anywhere
    here.leave()
    assert here.file.written == written + published[2].rows.nbytes
    assert torch.equal(published[1].rows, features[2:5])
    assert torch.equal(published[2].rows, features[:, :2].t())
    before = features.clone()
    features.mul_(2)
    features.mul_(2)  # which has a slot of its own by now
    here.leave()
    assert torch.equal(published[0].rows, before)
    assert torch.equal(features, 4 * before)
    assert torch.equal(here.publish(features).rows, 4 * before)
    assert torch.equal(features_of(file), before)


def is_changed_unseen(file):
    features, here = features_of(file), residency()
    before, first = features.clone(), here.publish(features)
    array = features.numpy()
    second = here.publish(features)
    array[:] = 7
    assert torch.equal(first.rows, before)
    assert torch.equal(second.rows, before)
    assert torch.equal(here.publish(features).rows, torch.full_like(before, 7))


def is_changed_while_others_read(file):
    features = features_of(file)
    found = sar.comm.exchange_tensors([features] * PLACES)
    features.zero_()
    unchanged = sar.comm.exchange_tensors([features_of(file)] * PLACES)
    assert all(torch.equal(found[rank], unchanged[rank]) for rank in range(PLACES) if rank != sar.rank())


@pytest.mark.parametrize("case", [is_published_as_it_is, is_changed_unseen, is_changed_while_others_read])
def test_in_place(tmp_path, case):
    sar.partition_graph(homogeneous_graph(), "graph", PLACES, tmp_path / "parts")
    VirtualPool(1, PLACES).run(case, tmp_path / "parts" / "graph.json")


# -- rows laid out for their readers


def sums_of_features(file):
    """Sums over neighbours of features as they are, once more, and changed unseen; and bytes written for each."""
    data = sar.load_dgl_partition_data(file, sar.rank(), "cpu")
    graph, features, here = sar.construct_full_graph(data), data.node_features["_N/feat"], residency()
    assert tensor_file.value.at_hand == 1  # byte
    found = []
    for change in (None, None, 1):
        if change is not None:
            features.numpy()[:] += change
        graph.srcdata["x"], before = features, here.file.written
        graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
        found.append((graph.dstdata["y"].clone(), here.file.written - before))
        graph.srcdata["x"] = features + 1  # rows of another layer, which come between
        graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
    return found, graph.in_degrees()


def test_rows_are_laid_out_again_if_they_have_changed(tmp_path):
    sar.partition_graph(homogeneous_graph(), "graph", PLACES, tmp_path / "parts")
    for found, degrees in VirtualPool(1, PLACES, fits=False).run(sums_of_features, tmp_path / "parts" / "graph.json"):
        (first, written), (second, none), (third, again) = found
        assert torch.equal(first, second)
        assert torch.allclose(third, first + degrees.unsqueeze(1))
        assert written > none
        assert again > none


# -- reading ahead

ROWS = 4096
"""One in each page."""

libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def published(tmp_path):
    file = SpillFile(tmp_path, Disk(0))
    slot, values = file.slot(ROWS * PAGE), torch.arange(ROWS).repeat_interleave(PAGE // 8)
    file.transfer(os.pwritev, memory_at(values.data_ptr(), values.nbytes), slot.begin)
    os.fdatasync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    yield Published.of(slot, (ROWS, PAGE // 8), torch.int64)
    file.close()


def resident(published):
    """Which pages the system has in memory."""
    found = (ctypes.c_ubyte * (ROWS + 1))()
    begin = published.rows.data_ptr() // PAGE * PAGE
    pages = -(-(published.rows.data_ptr() + published.rows.nbytes - begin) // PAGE)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * PAGE), found) == 0
    return [page for page in range(pages) if found[page] & 1]


@pytest.fixture
def dropped(published):
    if resident(published):
        pytest.skip("this file system keeps what it is told to drop")
    return published


def test_one_row(dropped):
    assert dropped.rows[1000, 5] == 1000
    assert len(resident(dropped)) <= 2  # where a row lies on two pages


def test_rows_asked_for(dropped):
    dropped.will_need(torch.tensor([50, 700, 3000]))
    for _ in range(100):
        if len(resident(dropped)) >= 2951:
            break
        time.sleep(0.1)
    there = resident(dropped)  # maybe not all: it is advice, and a system short of memory drops what nobody has read
    assert len(there) > 1000
    assert set(there) <= set(range(50, 3002))
    assert dropped.rows[[50, 3000], 0].tolist() == [50, 3000]


# -- `sar.profile`: each worker's own turns, and what left memory

PAUSE = 0.15


class Sums(nn.Module):
    def forward(self, x, seconds):
        time.sleep(seconds)
        return sar.all_sum(x)


def profiled(spill):
    filling = fill_the_heap() if spill else []
    layer, kept = Sums(), torch.ones(1000, 50)
    with sar.profile() as p:
        for _ in range(2):
            layer(kept, PAUSE * sar.rank())
    del filling
    layers = [[one.layer for one in rows] for rows in p.workers]
    return layers, [total(rows).seconds for rows in p.workers], p.spilled, p.table(), kept.nbytes


@pytest.mark.parametrize("spill", [True, False])
def test_turns(spill):
    for layers, seconds, spilled, table, kept in VirtualPool(1, PLACES, spill).run(profiled, spill):
        assert layers == [["Sums", "everything else"]] * PLACES
        for rank, own in enumerate(seconds):
            assert 2 * PAUSE * rank <= own < 2 * PAUSE * rank + 3 * PAUSE
        assert len(spilled) == (PLACES if spill else 0)
        assert ("MB left memory" in table) == spill
        for one in spilled:
            assert one.left >= kept
            assert one.written >= kept
