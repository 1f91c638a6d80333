"""What virtual workers load of features lies in files: published unwritten, and changed without others' notice."""

import pytest
import torch

import sar
from sar.comm import session
from sar.outofcore.residency import Residency
from tests.adapters.dgl.directories import homogeneous_graph
from tests.virtual.virtual_pool import VirtualPool

PLACES = 3


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


def ordinary_ones_change_unseen():
    mine = torch.ones(40_000) * sar.rank()
    array = mine.numpy()
    assert all(one[0] == rank for rank, one in enumerate(sar.comm.exchange_tensors([mine] * PLACES)))
    array += 1
    assert all(one[0] == rank + 1 for rank, one in enumerate(sar.comm.exchange_tensors([mine] * PLACES)))


@pytest.mark.parametrize("case", [is_published_as_it_is, is_changed_unseen, is_changed_while_others_read])
def test_in_place(tmp_path, case):
    sar.partition_graph(homogeneous_graph(), "graph", PLACES, tmp_path / "parts")
    VirtualPool(1, PLACES).run(case, tmp_path / "parts" / "graph.json")


def test_what_numpy_changes():
    VirtualPool(1, PLACES).run(ordinary_ones_change_unseen)
