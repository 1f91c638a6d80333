"""`partition_graph`: DGL finds in its parts what it finds in those of its own writer, and training on them is exact."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sar
from sar.core.build import select_relation
from sar.errors import ConfigError
from sar.partition.assign import assigning
from sar.partition.inspect.inspection import inspect_directory
from tests.adapters.dgl import dist_graph_trainer as trainer
from tests.adapters.dgl import test_dist_graph
from tests.adapters.dgl.directories import dgl, heterogeneous_graph, homogeneous_graph, write_directory
from tests.matrix import corner
from tests.parity.harness import assert_close
from tests.workers import WorkerPool

GRAPHS = {"homogeneous": homogeneous_graph, "heterogeneous": heterogeneous_graph}
Mapping = tuple[Any, Any]


def by_type(graph: Any, mapping: Mapping) -> tuple[dict[str, Tensor], dict[tuple[str, str, str], Tensor]]:
    """What `return_mapping` returns, of any graph by type."""
    nodes, edges = mapping
    if isinstance(nodes, dict):
        return nodes, edges
    [ntype], [etype] = graph.ntypes, graph.canonical_etypes
    return {ntype: nodes}, {etype: edges}


def contents(file: Path, graph: Any, mapping: Mapping) -> list[dict[str, Any]]:
    """Of each part, as DGL loads it: nodes, edges and their fields, by original ID."""
    found = []
    for part in range(dgl.distributed.load_partition_book(str(file), 0)[0].num_partitions()):
        local, node_fields, edge_fields, book, _, ntypes, etypes = dgl.distributed.load_partition(str(file), part)
        orig_nodes, orig_edges = by_type(graph, mapping)
        kinds, ids = (column.tolist() for column in book.map_to_per_ntype(local.ndata["_ID"]))
        nodes = [(ntypes[kind], int(orig_nodes[ntypes[kind]][i])) for kind, i in zip(kinds, ids, strict=True)]
        kinds, ids = (column.tolist() for column in book.map_to_per_etype(local.edata["_ID"]))
        edges = [(etypes[kind], int(orig_edges[etypes[kind]][i])) for kind, i in zip(kinds, ids, strict=True)]
        src, dst = (end.tolist() for end in local.edges(order="eid"))
        inner, inner_edge = local.ndata["inner_node"].tolist(), local.edata["inner_edge"].tolist()
        fields = {}
        for ntype in ntypes:
            own = orig_nodes[ntype][book.partid2nids(part, ntype)]
            fields |= {f"{ntype}/{k}": rows[own] for k, rows in graph.nodes[ntype].data.items()}
        for etype in etypes:
            own = orig_edges[etype][book.partid2eids(part, etype)]
            fields |= {f"{':'.join(etype)}/{k}": rows[own] for k, rows in graph.edges[etype].data.items()}
        loaded = node_fields | edge_fields
        fields = {key: rows for key, rows in fields.items() if not key.endswith("/_ID")}  # DGL's own, of subgraphs
        assert loaded.keys() == fields.keys()
        for key, rows in fields.items():
            assert torch.equal(loaded[key], rows.to(loaded[key].dtype)), key
        found.append(
            {
                "nodes": sorted(zip(nodes, inner, local.ndata["part_id"].tolist(), strict=True)),
                "edges": sorted((edges[e], nodes[src[e]], nodes[dst[e]], inner_edge[e]) for e in range(len(edges))),
            }
        )
    return found


def check(file: Path, graph: Any, mapping: Mapping) -> list[dict[str, Any]]:
    """Compare what DGL loads of all parts with the graph; what it has loaded."""
    parts = contents(file, graph, mapping)
    inner = sorted(node for part in parts for node, own, _ in part["nodes"] if own)
    assert inner == sorted((ntype, i) for ntype in graph.ntypes for i in range(graph.num_nodes(ntype)))
    edges = {}
    for etype in graph.canonical_etypes:
        ends = (end.tolist() for end in graph.edges(order="eid", etype=etype))
        for i, (src, dst) in enumerate(zip(*ends, strict=True)):
            edges[etype, i] = (etype[0], src), (etype[2], dst)
    assert sorted(e for part in parts for e, *_, own in part["edges"] if own) == sorted(edges)
    assert all(edges[e] == (src, dst) for part in parts for e, src, dst, _ in part["edges"])
    assert inspect_directory(file).problems == []
    return parts


def partition(graph: Any, folder: Path, num_parts: int, **options: Any) -> tuple[Path, Mapping]:
    """Divide with sar."""
    mapping = sar.partition_graph(graph, "graph", num_parts, folder, return_mapping=True, **options)
    assert mapping is not None
    return folder / "graph.json", mapping


def test_the_arguments_are_dgls() -> None:
    ours = inspect.signature(sar.partition_graph).parameters
    for place, (name, theirs) in enumerate(inspect.signature(dgl.distributed.partition_graph).parameters.items()):
        if theirs.kind is not inspect.Parameter.VAR_KEYWORD:
            assert list(ours)[place] == name
            assert ours[name].default == theirs.default


@pytest.mark.parametrize("num_hops", [1, 2, 3])
@pytest.mark.parametrize("make", GRAPHS)
def test_parts_are_those_of_dgl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str, num_hops: int) -> None:
    graph = GRAPHS[make]()
    theirs = write_directory(tmp_path / "theirs", graph, 3, num_hops=num_hops)
    part_of = []
    for ntype in graph.ntypes:
        sizes = [end - start for start, end in theirs.json()["node_map"][ntype]]
        part_of.append(np.empty(sum(sizes), np.int64))
        part_of[-1][theirs.node_ids[ntype]] = np.repeat(np.arange(3), sizes)
    monkeypatch.setattr(assigning, "method_named", lambda name: lambda task: np.concatenate(part_of))
    mine, mapping = partition(graph, tmp_path / "mine", 3, num_hops=num_hops, part_method="theirs")
    assert check(mine, graph, mapping) == check(theirs.path, graph, (theirs.node_ids, theirs.edge_ids))


ODD = {
    "no edges": lambda: dgl.graph(([], []), num_nodes=5),
    "int32": lambda: dgl.graph(([0, 1, 1, 2], [1, 2, 2, 0]), num_nodes=6, idtype=torch.int32),
    "named types": lambda: dgl.heterograph({("a", "r", "a"): ([0, 3], [1, 1])}),
    "a subgraph": lambda: dgl.node_subgraph(homogeneous_graph(), torch.arange(0, 60, 2)),
    "two relations": lambda: dgl.heterograph({("a", "r", "a"): ([0, 3], [1, 1]), ("a", "s", "a"): ([], [])}),
}


METHODS = [(1, "metis"), (3, "metis"), (2, "random"), (2, "spring"), (2, "multilevel")]


@pytest.mark.parametrize(
    "make, num_parts, method",
    [
        *(pytest.param(GRAPHS[name], *how, id=f"{name}-{how[0]}-{how[1]}") for name in GRAPHS for how in METHODS),
        *(pytest.param(make, 2, "metis", id=name) for name, make in ODD.items()),
        pytest.param(lambda: dgl.graph(([0], [0])), 1, "random", id="one node"),
    ],
)
def test_dgl_finds_the_graph_in_the_parts(tmp_path: Path, make: Callable[[], Any], num_parts: int, method: str) -> None:
    graph = make()
    before = {ntype: set(graph.nodes[ntype].data) for ntype in graph.ntypes}
    file, mapping = partition(graph, tmp_path / "parts", num_parts, part_method=method)
    assert isinstance(mapping[0], dict) == (not graph.is_homogeneous)
    check(file, graph, mapping)
    assert before == {ntype: set(graph.nodes[ntype].data) for ntype in graph.ntypes}
    assert (tmp_path / "parts" / "report.json").exists()


def test_nodes_and_edges_get_their_trainer(tmp_path: Path) -> None:
    graph = heterogeneous_graph()
    file, (nodes, edges) = partition(graph, tmp_path, 2, num_trainers_per_machine=3, part_method="random")
    trainer_of = {ntype: torch.empty(graph.num_nodes(ntype), dtype=torch.int64) for ntype in graph.ntypes}
    for ntype, part in ((ntype, part) for ntype in graph.ntypes for part in range(2)):
        _, fields, _, book, *_ = dgl.distributed.load_partition(str(file), part)
        assert (fields[f"{ntype}/trainer_id"] // 3 == part).all()
        trainer_of[ntype][nodes[ntype][book.partid2nids(part, ntype)]] = fields[f"{ntype}/trainer_id"]
    sizes = torch.cat([*trainer_of.values()]).bincount()
    assert len(sizes) == 6
    assert sizes.max() - sizes.min() <= 3
    for etype, part in ((etype, part) for etype in graph.canonical_etypes for part in range(2)):
        _, _, fields, book, *_ = dgl.distributed.load_partition(str(file), part)
        _, dst = graph.find_edges(edges[etype][book.partid2eids(part, etype)], etype=etype)
        assert torch.equal(fields[f"{':'.join(etype)}/trainer_id"], trainer_of[etype[2]][dst])
    assert "trainer_id" not in graph.nodes["paper"].data


@pytest.mark.parametrize("method", ["metis", "random", "spring"])
def test_in_edges_of_kinds_are_balanced(tmp_path: Path, method: str) -> None:
    """Where few nodes of a kind have most of its in-edges, and another kind has none."""
    drawn = torch.Generator().manual_seed(0)
    kind = torch.arange(600) % 3
    weight = (1 + torch.rand(600, generator=drawn)) ** 6 * torch.tensor([1.0, 4.0, 0.0])[kind]
    dst = torch.multinomial(weight, 6000, True, generator=drawn)
    graph = dgl.graph(((dst + 7) % 600, dst), num_nodes=600)
    graph.ndata["kind"] = kind
    file, _ = partition(graph, tmp_path, 4, part_method=method, balance_ntypes=kind, balance_edges=True)
    edges, nodes = torch.zeros(4, 3), torch.zeros(4, 3)
    for part in range(4):
        local, fields, *_ = dgl.distributed.load_partition(str(file), part)
        inner = local.ndata["inner_node"].bool()
        kinds = fields["_N/kind"][local.ndata[dgl.NID][inner] - local.ndata[dgl.NID][inner].min()]
        nodes[part] = kinds.bincount(minlength=3)
        edges[part].index_add_(0, kinds, local.in_degrees()[inner].float())
    for held in (nodes, edges):
        assert (held.max(0).values <= 1.06 * held.mean(0)).all()


def test_kinds_of_nodes_are_balanced_by_type(tmp_path: Path) -> None:
    graph = heterogeneous_graph()
    graph.nodes["paper"].data["kind"] = (torch.arange(40) < 10).int()
    file, _ = partition(
        graph, tmp_path, 2, balance_ntypes={"paper": graph.nodes["paper"].data["kind"]}, balance_edges=True
    )
    report = inspect_directory(file)
    for part in range(2):
        kinds = dgl.distributed.load_partition(str(file), part)[1]["paper/kind"]
        assert kinds.bincount().tolist() == [15, 5]
        for etype, count in report.num_edges.items():
            assert report.parts[part].in_edges[etype] <= 1.05 * count / 2 + 1


# -- what is refused


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_parts": 0}, "60 nodes into 0 parts; expected 1 to 60"),
        ({"objtype": "vol"}, "objtype is 'vol'; expected 'cut'"),
        ({"graph_formats": "csc"}, r"graph_formats is \['csc'\]; expected 'coo'"),
        ({"use_graphbolt": True}, "use_graphbolt is True; expected False"),
        ({"num_trainers_per_machine": 0}, "num_trainers_per_machine is 0; expected 1 or more"),
        ({"balance_ntypes": torch.zeros(59)}, r"shape \(59,\) and type float32.*'nodes': 60"),
        ({"num_parts": 61}, "60 nodes into 61 parts"),
        ({"balance_ntypes": {"paper": torch.zeros(60).int()}}, "for 'paper'; expected .*'_N': 60"),
        ({"graph_name": "a/b"}, r"names \['a/b'\]"),
        ({"num_parts": "2"}, "num_parts is '2'; expected a whole number"),
        ({"balance_ntypes": True}, "DGL before 1.0 had reshuffle before balance_ntypes, so name the arguments"),
        ({"reshuffle": False}, "reshuffle is False; expected True: sar and DGL 1.0 or later read contiguous IDs only"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    arguments = {"g": homogeneous_graph(), "graph_name": "graph", "num_parts": 2, "out_path": tmp_path / "parts"}
    with pytest.raises(ConfigError, match=words):
        sar.partition_graph(**arguments | options)
    assert os.listdir(tmp_path) == []


def test_bool_stays_bool(tmp_path: Path) -> None:
    """So that `~mask` is the other nodes, in a directory of sar's; DGL's files have bytes, and DGL reads these."""
    graph = heterogeneous_graph()
    for store in (graph.nodes["paper"], graph.edges["cites"]):
        [count] = {len(values) for values in store.data.values()}
        store.data["seen"], store.data["bytes"] = torch.arange(count) % 3 == 0, (torch.arange(count) % 3).byte()
        store.data["wide"] = store.data["seen"].repeat(2, 1).T
    file, _ = partition(graph, tmp_path, 2)
    for part in range(2):
        data = sar.load_dgl_partition_data(file, part, "cpu")
        shards = [shard for _, shard in data.all_shard_edges]
        for fields in (data.node_features, *shards):
            seen, wide, count = (sar.suffix_key_lookup(fields, name) for name in ("seen", "wide", "bytes"))
            assert (seen.dtype, wide.dtype, count.dtype) == (torch.bool, torch.bool, torch.uint8)
            assert torch.equal(seen, count == 0)
            assert torch.equal(wide, seen.repeat(2, 1).T)
        assert dgl.distributed.load_partition(str(file), part)[1]["paper/seen"].dtype == torch.uint8


def test_no_field_is_lost_to_names_of_ours(tmp_path: Path) -> None:
    """Those of IDs are refused; `_TYPE`, which `dgl.to_homogeneous` makes, is a field of edges of one type."""
    graph = dgl.to_homogeneous(heterogeneous_graph())
    file, _ = partition(graph, tmp_path / "types", 2)
    found = [sar.load_dgl_partition_data(file, part, "cpu") for part in range(2)]
    fields = [select_relation(shard, 0, data).features for data in found for shard in data.all_shard_edges]
    original, kinds = (torch.cat([one[name] for one in fields]) for name in ("orig_id", "_TYPE"))
    assert kinds.equal(graph.edata["_TYPE"][original])
    assert all(data["_N/_TYPE"].equal(graph.ndata["_TYPE"][data["orig_id"]]) for data in found)
    for frame in (graph.ndata, graph.edata):
        frame["orig_id"] = torch.arange(len(frame["_TYPE"]))
        with pytest.raises(ConfigError, match="/orig_id' has the name under which parts have IDs"):
            partition(graph, tmp_path / "ids", 2)
        frame["trainer_id"] = frame.pop("orig_id")
        with pytest.raises(ConfigError, match="'trainer_id', which is to hold trainers"):
            partition(graph, tmp_path / "trainers", 2, num_trainers_per_machine=2)
        frame.pop("trainer_id")


def test_graphs_in_memory_are_taken_everywhere(tmp_path: Path) -> None:
    graph = homogeneous_graph()
    expected = torch.stack(graph.edges(order="eid")).tolist()
    file = sar.write_chunked(graph, tmp_path / "chunked")
    made = [sar.open_graph(file, tmp_path / "scratch"), sar.clean_up(graph, tmp_path / "clean")]
    for one in made:
        [(src, dst)] = one.edges["_N", "_E", "_N"].chunks()
        assert [src.tolist(), dst.tolist()] == expected
    report = sar.write_partitions(graph, np.zeros(60, np.int64), 1, tmp_path / "parts", "graph", method="custom")
    assert report.edges == [graph.num_edges()]
    for call in (sar.write_chunked, sar.clean_up):
        with pytest.raises(ConfigError, match=r"the graph is a builtins\.str; expected a DGLGraph"):
            call("graph.dgl", tmp_path / "none")  # type: ignore[operator]


def field(values: Tensor) -> Any:
    graph = dgl.graph(([0], [1]))
    graph.ndata["x"] = values
    return graph


@pytest.mark.parametrize(
    "graph, words",
    [
        ("graph.dgl", "the graph is a builtins.str; expected a DGLGraph"),
        (lambda: dgl.graph(([0], [1])).formats("csc"), r"allows the formats \['csc'\] only; expected coo"),
        (lambda: dgl.to_block(dgl.graph(([0], [1]))), "a block of sampled edges"),
        (lambda: field(torch.zeros(2, dtype=torch.bfloat16)), "'_N/x' is bfloat16"),
        (lambda: field(torch.zeros(2).to(torch.float8_e5m2)), "'_N/x' is float8_e5m2, which numpy lacks"),
        (lambda: field(torch.zeros(2, dtype=torch.uint16)), "'_N/x' cannot be written: its type is uint16"),
    ],
)
def test_other_graphs_are_refused(tmp_path: Path, graph: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sar.partition_graph(graph() if callable(graph) else graph, "graph", 1, tmp_path / "parts")
    assert os.listdir(tmp_path) == []


# -- training


def on_worker(file: Path) -> Any:
    data = sar.load_dgl_partition_data(file, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    for ntype, name in (key.split("/") for key in data.node_features if "/" in key):
        graph.nodes[ntype].data[name] = data.node_features[f"{ntype}/{name}"]
    return trainer.evaluate(graph)


TRAINED = {"homogeneous": trainer.homogeneous_graph, "heterogeneous": trainer.heterogeneous_graph}


@pytest.mark.parametrize(
    "make, num_parts, num_hops, world_size",
    [
        ("heterogeneous", 3, 2, 1),
        ("homogeneous", 3, 2, 2),
        ("heterogeneous", 3, 1, 3),
        *(corner(make, 2, hops, workers) for make in TRAINED for hops in (1, 3) for workers in (2, 3)),
    ],
)
def test_outputs_and_gradients_are_those_of_one_machine(
    pool: WorkerPool, tmp_path: Path, make: str, num_parts: int, num_hops: int, world_size: int
) -> None:
    graph = TRAINED[make]()
    expected = trainer.evaluate(graph)
    file, _ = partition(graph, tmp_path, num_parts, num_hops=num_hops, balance_edges=True)
    found = pool.run(on_worker, file)
    for kind in ("nodes", "edges"):
        for name, columns in expected[kind].items():
            numbers = torch.cat([results[kind][name]["number"] for results in found])
            assert numbers.sort().values.equal(torch.arange(len(numbers)))
            for key, rows in columns.items():
                actual = torch.cat([results[kind][name][key] for results in found])
                if rows.dtype == torch.bool:
                    assert actual.equal(rows[numbers])
                else:
                    assert_close(actual, rows[numbers], 1e-9)
    for results in found:
        for name, gradient in expected["parameters"]["grad"].items():
            assert_close(results["parameters"]["grad"][name], gradient, 1e-9)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("make", TRAINED)
def test_dist_graph_reads_it(pool: WorkerPool, tmp_path: Path, make: str, world_size: int) -> None:
    graph = TRAINED[make]()
    file, _ = partition(graph, tmp_path, 1)
    test_dist_graph.check(graph, pool.run(test_dist_graph.convert, file))
