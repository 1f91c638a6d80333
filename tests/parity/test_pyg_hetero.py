"""Layers of PyTorch Geometric over several edge types equal one machine."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import utils

import sar
from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.errors import GraphError
from tests.hetero_graphs import OUT, WIDTH, partition_hetero, whole_graph
from tests.matrix import corner
from tests.parity.harness import assert_typed_close, check, gradients, random_data, typed_gradients
from tests.parity.pyg_layers import edges_of
from tests.parity.scenarios import SCENARIOS


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
    return typed_gradients(out, cotangents, x, model)


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
    return whole_graph(kept={"cites": slice(0), "writes": slice(5)})


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
            assert_typed_close([by_type[name] for by_type in by_rank], expected, parts.node_ids)


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
    return gradients(layer(x, edges_of(graph), kinds), data, layer, x=x)


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes", "isolated", "no edges"])
@pytest.mark.parametrize("world_size", [2])
def test_relations_without_edges(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(with_missing_relations, (name,)) for name in ("RGCNConv", "FastRGCNConv", "RGATConv")]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))
