"""Every node, edge and feature that the reader returns, against the graph that was partitioned."""

import json
import shutil

import pytest
import torch
from torch import Tensor

import sar
from sar.adapters.dgl.load import load_dgl_partition_data
from sar.common_tuples import PartitionData, ShardEdgesAndFeatures
from tests.adapters.dgl.directories import (
    Directory,
    dgl,
    heterogeneous_graph,
    homogeneous_graph,
    insert_empty_partition,
    to_dispatch,
    write_directory,
)
from tests.core.attempts import assert_disagreement, catch

GRAPHS = {"homogeneous": homogeneous_graph, "heterogeneous": heterogeneous_graph}


class Oracle:
    """What a directory must be read as, by way of the ID mapping that DGL returned when it wrote it.

    Ranges come from the JSON file of the directory before it was rewritten.
    """

    def __init__(self, directory: Directory) -> None:
        self.graph = directory.graph
        content = directory.json()
        self.node_ranges = [content["node_map"][name] for name in self.graph.ntypes]
        self.edge_ranges = [content["edge_map"][":".join(name)] for name in self.graph.canonical_etypes]
        self.node_ids = list(directory.node_ids.values())
        self.edge_ids = list(directory.edge_ids.values())
        self.homogeneous = self.graph.is_homogeneous

    def check(self, partitions: list[PartitionData], *, orig_ids: bool = False, features: bool = True) -> None:
        """Compare all partitions with the graph."""
        nodes, edges = [], []
        for part, data in enumerate(partitions):
            start, end = data.node_ranges[part]
            assert data.node_type_names == self.graph.ntypes
            assert data.edge_type_names == self.graph.canonical_etypes
            assert data.node_ranges == partitions[0].node_ranges
            assert data.node_features["_ID"].tolist() == list(range(start, end))
            self._check_nodes(data.node_features, orig_ids, features and end > start)
            nodes.append(data.node_features["_ID"])
            assert len(data.all_shard_edges) == len(partitions)
            for (source_start, source_end), shard in zip(data.node_ranges, data.all_shard_edges, strict=True):
                src, dst = shard.edges
                assert ((src >= source_start) & (src < source_end)).all()
                assert ((dst >= start) & (dst < end)).all()
                self._check_shard(shard, orig_ids, features and end > start)
                edges.append(shard.edge_features["_ID"])
        assert torch.cat(nodes).tolist() == list(range(self.graph.num_nodes()))
        assert torch.cat(edges).sort().values.tolist() == list(range(self.graph.num_edges()))

    def _check_nodes(self, found: dict[str, Tensor], orig_ids: bool, features: bool) -> None:
        types, original = self._original_nodes(found["_ID"])
        assert torch.equal(found["_TYPE"].long(), types)
        keys = {"_ID", "_TYPE"}
        if orig_ids:
            keys.add("orig_id")
            assert torch.equal(found["orig_id"], original)
        for ntype in self.graph.ntypes if features else ():
            mine = original[types == self.graph.get_ntype_id(ntype)]
            for name, values in self.graph.nodes[ntype].data.items():
                keys.add(f"{ntype}/{name}")
                expected = values[mine].to(torch.uint8) if values.dtype == torch.bool else values[mine]
                assert found[f"{ntype}/{name}"].dtype == expected.dtype
                assert torch.equal(found[f"{ntype}/{name}"], expected)
        assert found.keys() == keys

    def _check_shard(self, shard: ShardEdgesAndFeatures, orig_ids: bool, features: bool) -> None:
        (src, dst), found = shard
        edge_id = found["_ID"]
        assert src.dtype == dst.dtype == edge_id.dtype == torch.int64
        assert (dst.diff() >= 0).all()
        assert (edge_id.diff()[dst.diff() == 0] > 0).all()
        types, original = _look_up(self.edge_ranges, self.edge_ids, edge_id)
        keys = {"_ID"} if self.homogeneous else {"_ID", "_TYPE"}
        if not self.homogeneous:
            assert torch.equal(found["_TYPE"].long(), types)
        if orig_ids:
            keys.add("orig_id")
            assert torch.equal(found["orig_id"], original)
        for type_id, etype in enumerate(self.graph.canonical_etypes):
            mine = types == type_id
            self._check_ends(etype, src[mine], dst[mine], original[mine])
            for name, values in self.graph.edges[etype].data.items() if features else ():
                key = name if self.homogeneous else f"{':'.join(etype)}/{name}"
                keys.add(key)
                assert found[key].dtype == values.dtype
                assert torch.equal(found[key], values[original[mine]])
        assert found.keys() == keys

    def _check_ends(self, etype: tuple[str, str, str], src: Tensor, dst: Tensor, original_edges: Tensor) -> None:
        all_src, all_dst = self.graph.edges(etype=etype, order="eid")
        for found, ntype, expected in ((src, etype[0], all_src), (dst, etype[2], all_dst)):
            types, original = self._original_nodes(found)
            assert (types == self.graph.get_ntype_id(ntype)).all()
            assert torch.equal(original, expected[original_edges])

    def _original_nodes(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _look_up(self.node_ranges, self.node_ids, ids)


def _look_up(ranges: list[list[tuple[int, int]]], original: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Type and original ID of global IDs, one by one, from the ranges by type and partition."""
    types, originals = torch.full_like(ids, -1), torch.full_like(ids, -1)
    for type_id, of_type in enumerate(ranges):
        before = 0
        for start, end in of_type:
            here = (ids >= start) & (ids < end)
            types[here], originals[here] = type_id, original[type_id][ids[here] - start + before]
            before += end - start
    return types, originals


def load_all(directory: Directory) -> list[PartitionData]:
    return [load_dgl_partition_data(str(directory.path), part, "cpu") for part in range(directory.num_parts)]


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("method", ["random", "metis"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_directories_of_the_installed_dgl(tmp_path, kind, method, num_parts):
    directory = write_directory(tmp_path, GRAPHS[kind](), num_parts, method)
    Oracle(directory).check(load_all(directory))


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize(
    "options", [{"num_hops": 2}, {"graph_formats": "csc"}, {"graph_formats": ["coo", "csr"]}], ids=str
)
def test_more_halo_and_other_sparse_formats(tmp_path, kind, options):
    directory = write_directory(tmp_path, GRAPHS[kind](), 3, **options)
    Oracle(directory).check(load_all(directory))


@pytest.mark.parametrize("orig_ids", [False, True])
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("kind", GRAPHS)
def test_directories_of_the_dispatch_pipeline(tmp_path, kind, features, orig_ids):
    directory = write_directory(tmp_path, GRAPHS[kind](), 3)
    oracle = Oracle(directory)
    directory = to_dispatch(directory, features=features, orig_ids=orig_ids)
    oracle.check(load_all(directory), orig_ids=orig_ids, features=features)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", GRAPHS)
def test_empty_partitions(tmp_path, kind, at):
    directory = write_directory(tmp_path, GRAPHS[kind](), 2)
    oracle = Oracle(directory)
    directory = insert_empty_partition(directory, at)
    for ranges in (*oracle.node_ranges, *oracle.edge_ranges):
        ranges.insert(at, (0, 0))
    partitions = load_all(directory)
    start, end = partitions[at].node_ranges[at]
    assert start == end
    oracle.check(partitions)


def test_types_without_nodes_and_edges(tmp_path):
    directory = write_directory(tmp_path, heterogeneous_graph(), 2)

    def add_types(content):
        content["ntypes"] = {"author": 0, "reviewer": 1, "paper": 2, "venue": 3}
        content["node_map"]["reviewer"] = [[-1, -1], [-1, -1]]
        content["etypes"]["reviewer:reads:paper"] = 4
        content["edge_map"]["reviewer:reads:paper"] = [[-1, -1], [-1, -1]]

    plain = load_all(directory)
    directory.edit(add_types)
    for before, data in zip(plain, load_all(directory), strict=True):
        assert data.node_type_names == ["author", "reviewer", "paper", "venue"]
        assert data.edge_type_names == [*before.edge_type_names, ("reviewer", "reads", "paper")]
        assert data.node_features["_TYPE"].tolist() == [
            {0: 0, 1: 2, 2: 3}[old] for old in before.node_features["_TYPE"].tolist()
        ]
        assert torch.equal(data.node_features["paper/feat"], before.node_features["paper/feat"])
        for old, new in zip(before.all_shard_edges, data.all_shard_edges, strict=True):
            assert torch.equal(old.edges[0], new.edges[0])
            assert torch.equal(old.edge_features["_TYPE"], new.edge_features["_TYPE"])


def test_edges_of_a_graph_file_may_come_in_any_order(tmp_path):
    directory = write_directory(tmp_path, heterogeneous_graph(), 2)

    def shuffle(graph):
        order = torch.randperm(graph.num_edges(), generator=torch.Generator().manual_seed(3))
        src, dst = (ends[order] for ends in graph.edges(order="eid"))
        result = dgl.graph((src, dst), num_nodes=graph.num_nodes())
        result.ndata.update(graph.ndata)
        result.edata.update({key: values[order] for key, values in graph.edata.items()})
        return result

    for part in range(2):
        directory.edit_graph(part, shuffle)
    Oracle(directory).check(load_all(directory))


@pytest.mark.parametrize("kind", GRAPHS)
def test_partition_book_is_the_one_that_dgl_loads(tmp_path, kind):
    directory = write_directory(tmp_path, GRAPHS[kind](), 3)
    expected = dgl.distributed.load_partition_book(str(directory.path), 2)[0]
    book = load_dgl_partition_data(directory.path, 2, "cpu").partition_book
    assert type(book) is type(expected)
    assert (book.partid, book.num_partitions()) == (2, 3)
    assert book.canonical_etypes == expected.canonical_etypes
    nodes, edges = torch.arange(directory.graph.num_nodes()), torch.arange(directory.graph.num_edges())
    assert torch.equal(book.nid2partid(nodes), expected.nid2partid(nodes))
    assert torch.equal(book.eid2partid(edges), expected.eid2partid(edges))
    for found, wanted in zip(book.map_to_per_ntype(nodes), expected.map_to_per_ntype(nodes), strict=True):
        assert torch.equal(found, wanted)
    for ntype in directory.graph.ntypes:
        assert torch.equal(book.partid2nids(1, ntype), expected.partid2nids(1, ntype))


def test_user_field_called_like_an_id_field_wins(tmp_path):
    graph = homogeneous_graph()
    graph.edata["orig_id"] = torch.arange(1000, 1000 + graph.num_edges())
    directory = to_dispatch(write_directory(tmp_path, graph, 2), features=True, orig_ids=True)
    shard = load_dgl_partition_data(directory.path, 0, "cpu").all_shard_edges[1]
    assert len(shard.edges[0]) > 0
    assert (shard.edge_features["orig_id"] >= 1000).all()


def test_json_with_absolute_paths(tmp_path):
    directory = write_directory(tmp_path, homogeneous_graph(), 2)
    oracle = Oracle(directory)
    folder = directory.path.parent

    def absolute(content):
        for part in range(2):
            content[f"part-{part}"] = {kind: str(folder / file) for kind, file in content[f"part-{part}"].items()}

    directory.edit(absolute)
    oracle.check(load_all(directory))  # its own files, spelled out


def load_share(parts, path):
    return load_dgl_partition_data(path, sar.rank(), "cpu", parts=parts)


@pytest.mark.parametrize(  # DGL does not divide the small types of the heterogeneous graph into more parts
    "name, num_parts, world_size",
    [
        *(("homogeneous", *counts) for counts in ((1, 3), (4, 1), (5, 2), (8, 3))),
        *(("heterogeneous", *counts) for counts in ((1, 3), (3, 1), (3, 2))),
    ],
)
def test_any_number_of_workers(pool, tmp_path, name, num_parts, world_size):
    directory = write_directory(tmp_path, GRAPHS[name](), num_parts)
    partitions = pool.run(load_share, directory.path.parent, per_rank=[None] * world_size)
    Oracle(directory).check(partitions)
    edges = [sum(len(shard.edges[0]) for shard in data.all_shard_edges) for data in partitions]
    assert max(edges) <= 1.5 * sum(edges) / world_size + 20


def construct_from(path):
    data = load_dgl_partition_data(path, sar.rank(), "cpu")
    return catch(sar.construct_full_graph, data)


@pytest.mark.parametrize("world_size", [2])
def test_directories_of_other_descriptions(pool, tmp_path):
    """Worker 1 has the directory of another run: equal ranges, and a JSON file that says something else."""
    directory = write_directory(tmp_path / "one", homogeneous_graph(), 2)
    shutil.copytree(directory.path.parent, tmp_path / "other")
    other = tmp_path / "other" / directory.path.name
    content = directory.json()
    other.write_text(json.dumps(dict(reversed(content.items()))))
    assert pool.run(construct_from, per_rank=[directory.path, other]) == [None, None], "the order means nothing"
    other.write_text(json.dumps(content | {"part_method": "by hand"}))
    assert_disagreement(pool.run(construct_from, per_rank=[directory.path, other]), "partition directory")


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("world_size", [2])
def test_chosen_partitions(pool, tmp_path, name):
    directory = write_directory(tmp_path, GRAPHS[name](), 4)
    one_by_one = [load_dgl_partition_data(directory.path, part, "cpu") for part in range(4)]
    order = [0, 3, 1, 2]
    chosen = pool.run(load_share, directory.path, per_rank=[[3, 0], [1, 2]])
    sizes = [len(one_by_one[part].node_features["_ID"]) for part in order]
    assert chosen[0].node_ranges == [(0, sum(sizes[:2])), (sum(sizes[:2]), sum(sizes))]
    for mine, parts in zip(chosen, ([0, 3], [1, 2]), strict=True):
        assert mine.partition_book is None
        for key, values in mine.node_features.items():
            if key != "_ID":
                assert values.equal(torch.cat([one_by_one[part].node_features[key] for part in parts]))
        found = torch.cat([shard.edge_features["_ID"] for shard in mine.all_shard_edges])
        there = [shard.edge_features["_ID"] for part in parts for shard in one_by_one[part].all_shard_edges]
        assert found.sort().values.equal(torch.cat(there).sort().values)
    old = torch.cat([one_by_one[part].node_features["_ID"] for part in order])  # by new ID
    ends = {}
    for data in one_by_one:
        for (src, dst), fields in data.all_shard_edges:
            ends |= dict(zip(fields["_ID"].tolist(), zip(src.tolist(), dst.tolist(), strict=True), strict=True))
    for data in chosen:
        for (src, dst), fields in data.all_shard_edges:
            pairs = list(zip(old[src].tolist(), old[dst].tolist(), strict=True))
            assert pairs == [ends[edge] for edge in fields["_ID"].tolist()]


def test_a_directory_stands_for_its_json_file(tmp_path):
    directory = write_directory(tmp_path, homogeneous_graph(), 2)
    (tmp_path / "report.json").write_text("{}")
    directory.path = tmp_path
    partitions = load_all(directory)
    directory.path = tmp_path / "graph.json"
    Oracle(directory).check(partitions)
