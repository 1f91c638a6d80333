"""Layers of PyTorch Geometric over several edge types, and its normalisation and pooling, equal one machine."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import nn

import sar
from tests.hetero_graphs import partition_hetero
from tests.matrix import corner
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


def layers(metadata):
    return {
        "HeteroConv": conv_of_each_type,
        "HGTConv": lambda: pyg.HGTConv(WIDTH, 4, metadata, heads=2),
        "HANConv": lambda: pyg.HANConv(WIDTH, 4, metadata, heads=2),
        "to_hetero": lambda: pyg.to_hetero(TwoLayers(), ([*metadata[0]], list(metadata[1]))),
    }


LAYERS = ("HeteroConv", "HGTConv", "HANConv", "to_hetero")


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


@pytest.mark.parametrize("world_size", [2, corner(3)])
def test_several_edge_types(pool, world_size):
    graph = whole_graph()
    generator = torch.Generator().manual_seed(0)
    assignment = {t: torch.randint(world_size, (graph.num_nodes(t),), generator=generator) for t in graph.ntypes}
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


NORMS = {
    "BatchNorm": lambda: pyg.BatchNorm(6),
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(6, 3),
    "GraphNorm": lambda: pyg.GraphNorm(6),
    "GraphSizeNorm": lambda: pyg.GraphSizeNorm(),
    "InstanceNorm": lambda: pyg.InstanceNorm(6, affine=True, track_running_stats=True),
    "LayerNorm graph": lambda: pyg.LayerNorm(6),
    "LayerNorm node": lambda: pyg.LayerNorm(6, mode="node"),
    "MeanSubtractionNorm": lambda: pyg.MeanSubtractionNorm(),
    "PairNorm": lambda: pyg.PairNorm(),
    "PairNorm individually": lambda: pyg.PairNorm(2.0, scale_individually=True),
}


def norm_results(graph, data, name, training):
    torch.manual_seed(5)
    layer = NORMS[name]().double()
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(torch.rand_like(value))
    if dist.is_initialized():
        layer = sar.pyg.convert_norms(layer)
    x = data.leaf("x")
    layer(x)  # moves the running statistics
    layer.train(training)
    out = layer(x)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    state = {f"same state {key}": value.double() for key, value in layer.state_dict().items()}
    return {"node out": out, "node x.grad": x.grad, **parameter_gradients(layer), **state}


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [2])
def test_normalisation(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(norm_results, (name, training)) for name in NORMS for training in (True, False)]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))


def pooled(graph, data, kind, several):
    x = data.leaf("x")
    x_in = x.relu()  # ties
    batch = (data.nodes["y"][:, 0] > 0).long() if several else None
    owner = sar.pyg if dist.is_initialized() else pyg
    out = getattr(owner, f"global_{kind}_pool")(x_in, batch, 2 if several else None)
    (out.flatten() * torch.arange(1.0, out.numel() + 1, dtype=out.dtype)).sum().div(
        sar.world_size() if dist.is_initialized() else 1
    ).backward()
    return {"same out": out, "node x.grad": x.grad}


@pytest.mark.parametrize("world_size", [2])
def test_pooling(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    cases = [(pooled, (kind, several)) for kind in ("add", "mean", "max") for several in (False, True)]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))
    empty = SCENARIOS["first worker without nodes"](world_size)
    check(pool, empty, random_data(empty, torch.float64), cases, (1,))
