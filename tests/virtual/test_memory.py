"""What stays in memory of a virtual worker whose turn has passed."""

import dgl.function as fn
import pytest
import torch

import sar
from sar.spillable import tensor_file
from tests.graphs import partition_in_memory, random_graph
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import close_shared_pools


def anonymous():
    """Bytes of the process that are of no file."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def leaves_and_comes_back(changes):
    """What a tensor holds after turns of others, and what memory it and one that autograd has saved take meanwhile."""
    parameter, before = torch.ones((), requires_grad=True), anonymous()
    kept = torch.arange(2.0**20) + sar.rank()
    saved = kept.clone()
    product = (parameter * saved).sum()
    del saved
    sar.all_sum(0)
    taken = anonymous() - before if sar.rank() == 0 else 0  # whose turn began when nobody had anything
    kept.sum()
    if changes:
        kept[5:7] = -1
    product.backward()
    for _ in range(3):  # whoever has the turn writes to slots that are free now
        torch.rand(2**20)
        sar.all_sum(0)
    expected = torch.arange(2.0**20) + sar.rank()
    gradient = expected.sum()
    if changes:
        expected[5:7] = -1
    return torch.equal(kept, expected), torch.equal(parameter.grad, gradient), taken


@pytest.mark.parametrize("changes", [False, True])
def test_what_waits_is_out_of_memory(changes):
    for kept, gradient, taken in VirtualPool(1, 3).run(leaves_and_comes_back, changes):
        assert kept
        assert gradient
        assert taken < 2**22  # of 24 MB


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


def writes(data):
    """What a worker writes for a sum over neighbours and its gradient, in sizes of the field."""
    graph = sar.construct_full_graph(data)
    x = torch.rand(graph.num_nodes(), 4096, requires_grad=True)
    graph.ndata["x"] = x
    sar.all_sum(0)
    before = tensor_file.value.file.written
    graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
    graph.ndata.pop("y").sum().backward()
    assert x.grad is not None
    return (tensor_file.value.file.written - before) / x.nbytes


def test_sums_are_not_written_before_they_are_complete():
    close_shared_pools()  # in a heap with large gaps, tensors get no pages of their own, and are copied to the file
    parts = partition_in_memory(random_graph(0, 60, 900), torch.arange(60) % 3, 3).partitions
    assert max(VirtualPool(1, 3).run(writes, per_rank=parts)) < 0.5
