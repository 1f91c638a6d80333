"""Layers of PyTorch Geometric over several edge types equal one machine."""

import dgl
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import utils
from torch_geometric.data import HeteroData

import sar
from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.errors import GraphError
from tests.hetero_graphs import partition_hetero
from tests.matrix import corner
from tests.parity import pyg_layers
from tests.parity.harness import assert_close, check, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS
from tests.parity.test_hetero import OUT, WIDTH, whole_graph


def conv_of_each_type():
    return pyg.HeteroConv(
        {
            ("author", "writes", "paper"): pyg.SAGEConv((WIDTH, WIDTH), OUT),
            ("paper", "written by", "author"): pyg.GATConv((WIDTH, WIDTH), OUT, add_self_loops=False),
            ("paper", "cites", "paper"): pyg.GCNConv(WIDTH, OUT),
            ("paper", "about", "topic"): pyg.GraphConv((WIDTH, WIDTH), OUT, aggr="max"),
        },
        aggr="mean",
    )


class TwoLayers(nn.Module):
    """A model for one type of nodes and edges, which `to_hetero` changes."""

    def __init__(self):
        super().__init__()
        self.first = pyg.SAGEConv((WIDTH, WIDTH), 6)
        self.last = pyg.SAGEConv((6, 6), OUT, aggr="sum")

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


class AgainstCitations(nn.Module):
    """Messages from papers to those that they cite, of one of several node types."""

    def forward(self, x, edges):
        cites = edges["paper", "cites", "paper"]
        cited = cites.reversed if isinstance(cites, DistributedEdgeIndex) else cites.flip(0)
        return x | {"paper": pyg.SimpleConv("mean")(x["paper"], cited)}


def layers(metadata):
    return {
        "reversed": AgainstCitations,
        "HeteroConv": conv_of_each_type,
        "HGTConv": lambda: pyg.HGTConv(WIDTH, 4, metadata, heads=2),
        "HANConv": lambda: pyg.HANConv(WIDTH, 4, metadata, heads=2),
        "to_hetero": lambda: pyg.to_hetero(TwoLayers(), ([*metadata[0]], list(metadata[1]))),
    }


LAYERS = ("reversed", "HeteroConv", "HGTConv", "HANConv", "to_hetero")


def results(name, features, cotangents, edges):
    torch.manual_seed(5)
    model = layers((list(features), list(edges)))[name]().double()
    x = {ntype: rows.clone().requires_grad_() for ntype, rows in features.items()}
    out = {ntype: rows for ntype, rows in model(x, edges).items() if rows is not None}
    sum(weighted_sum(rows, cotangents[ntype]) for ntype, rows in out.items()).backward()
    made = {f"out {ntype}": rows.detach() for ntype, rows in out.items()}
    made |= {f"grad {ntype}": rows.grad for ntype, rows in x.items()}
    return made | parameter_gradients(model)


def plain_names(edges):
    """Relations without blanks, which `to_hetero` wants for names of attributes."""
    return {(source, name.replace(" ", "_"), target): index for (source, name, target), index in edges.items()}


def on_worker(data, mode, names):
    sar.Config.disable_sr = mode == 2
    graph = sar.construct_full_graph(data)
    graph = graph.get_full_partition_graph() if mode == 3 else graph
    edges = sar.pyg.edge_index(graph)
    features = {t: data.node_features[f"{t}/x"].double() for t in graph.ntypes}
    cotangents = {t: data.node_features[f"{t}/cotangent"].double() for t in graph.ntypes}
    found = {}
    for name in names:
        renamed = plain_names(edges) if name == "to_hetero" else edges
        found[name] = results(name, features, cotangents, renamed)
    return found


def apart():
    """No edges of one type, few of another, so that most nodes have none into them."""
    graph = dgl.remove_edges(whole_graph(), torch.arange(90), etype="cites")
    return dgl.remove_edges(graph, torch.arange(5, 120), etype="writes")


@pytest.mark.parametrize("kind", ["anywhere", "apart"])
@pytest.mark.parametrize("world_size", [2, corner(3)])
def test_several_edge_types(pool, world_size, kind):
    graph = whole_graph() if kind == "anywhere" else apart()
    generator = torch.Generator().manual_seed(0)
    assignment = {t: torch.randint(world_size, (graph.num_nodes(t),), generator=generator) for t in graph.ntypes}
    if kind == "apart":  # a worker lacks these types of nodes
        assignment |= {"topic": torch.zeros(20).long(), "author": torch.full((25,), world_size - 1)}
    parts = partition_hetero(graph, assignment, world_size)
    edges = {etype: torch.stack(graph.edges(etype=etype)) for etype in graph.canonical_etypes}
    features = {t: graph.nodes[t].data["x"].double() for t in graph.ntypes}
    cotangents = {t: graph.nodes[t].data["cotangent"].double() for t in graph.ntypes}
    for mode in (1, 2, 3):
        by_rank = pool.run(on_worker, mode, LAYERS, per_rank=parts.partitions)
        for name in LAYERS:
            renamed = plain_names(edges) if name == "to_hetero" else edges
            expected = results(name, features, cotangents, renamed)
            for key, value in expected.items():
                found = [by_type[name][key] for by_type in by_rank]
                if key.startswith("same "):
                    assert_close(found[0], value)
                else:
                    assert_close(torch.cat(found), value[parts.node_ids[key.split(" ")[1]]])


def loops_between_types(data):
    edges = sar.pyg.edge_index(sar.construct_full_graph(data))
    x = [data.node_features[f"{t}/x"].double() for t in ("author", "paper")]
    conv = pyg.GATConv((WIDTH, WIDTH), OUT).double()
    with pytest.raises(GraphError, match=r"'author', were compared with .* 'paper', .* add_self_loops=False"):
        conv(tuple(x), edges["author", "writes", "paper"])
    with pytest.raises(GraphError, match="self-loop"):
        utils.add_self_loops(edges["author", "writes", "paper"], num_nodes=(len(x[0]), len(x[1])))
    conv((x[1], x[1]), edges["paper", "cites", "paper"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_nodes_of_two_types_are_not_compared(pool, world_size):
    """Equal numbers there are no self-loops, and on one machine they pair other nodes."""
    graph = whole_graph()
    assignment = {t: torch.arange(graph.num_nodes(t)) % world_size for t in graph.ntypes}
    pool.run(loops_between_types, per_rank=partition_hetero(graph, assignment, world_size).partitions)


def other_rows(data):
    edges = sar.pyg.edge_index(sar.construct_full_graph(data))
    features = {t: data.node_features[f"{t}/x"].double() for t in ("author", "paper", "topic")}
    for name in ("HGTConv", "HANConv", "HeteroConv"):
        layer = layers((list(features), list(edges)))[name]().double()
        for ntype, x in features.items():
            for rows in (torch.cat([x, x]), x[:-1]):
                with pytest.raises(GraphError, match="expected a row for each of this worker's"):
                    layer({**features, ntype: rows}, edges)


@pytest.mark.parametrize("world_size", [2])
def test_rows_of_another_number_are_refused(pool, world_size):
    graph = whole_graph()
    assignment = {t: torch.arange(graph.num_nodes(t)) % world_size for t in graph.ntypes}
    pool.run(other_rows, per_rank=partition_hetero(graph, assignment, world_size).partitions)


def with_missing_relations(graph, data, name):
    """Of seven relations two have no edges, and one has edges into few nodes."""
    torch.manual_seed(5)
    layer = getattr(pyg, name)(6, 4, 7, **({"heads": 2} if name == "RGATConv" else {"num_bases": 3})).double()
    kinds = (data.edges["w"][:, 0] * 2).long().clamp(max=5)
    x = data.leaf("x")
    out = layer(x, pyg_layers.edges_of(graph), kinds)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node out": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes", "isolated", "no edges"])
@pytest.mark.parametrize("world_size", [2])
def test_relations_without_edges(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(with_missing_relations, (name,)) for name in ("RGCNConv", "FastRGCNConv", "RGATConv")]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))


def in_order_on_worker(directory):
    data = sar.pyg.load_partition(directory)
    torch.manual_seed(5)
    x = {ntype: data[ntype].x for ntype in data.node_types}
    out = pyg.HGTConv(WIDTH, 4, data.metadata()).double()(x, data.edge_index_dict)
    papers = sar.to_original_order(out["paper"].detach(), data["paper"].orig_id, out=f"{directory}/papers.npy")
    writes = data["author", "writes", "paper"]
    found = sar.to_original_order(writes.edge_attr, writes.orig_id, out=f"{directory}/edges.npy")
    return torch.from_numpy(papers[:]), torch.from_numpy(found[:])


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_in_the_order_of_the_data(pool, world_size, tmp_path):
    graph, data = whole_graph(), HeteroData()
    for ntype in graph.ntypes:
        data[ntype].x = graph.nodes[ntype].data["x"].double()
    for etype in graph.canonical_etypes:
        data[etype].edge_index = torch.stack(graph.edges(etype=etype))
    data["author", "writes", "paper"].edge_attr = torch.arange(120.0).view(60, 2).repeat(2, 1)
    sar.partition_graph(data, "graph", 2, str(tmp_path), part_method="random")
    for papers, edges in pool.run(in_order_on_worker, str(tmp_path)):
        torch.manual_seed(5)
        out = pyg.HGTConv(WIDTH, 4, data.metadata()).double()(data.x_dict, data.edge_index_dict)
        assert_close(papers, out["paper"].detach())
        assert torch.equal(edges, data["author", "writes", "paper"].edge_attr)
