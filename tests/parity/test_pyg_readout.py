"""Normalisation, pooling and aggregation of PyTorch Geometric over the nodes of all workers, equal to one machine."""

import re
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import inf, nan, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import aggr

import sar
from sar.adapters.pyg import refused
from sar.errors import ConfigError, GraphError
from tests.matrix import corner
from tests.parity.harness import check, gradients, parameter_gradients, random_data, run_everywhere
from tests.parity.pyg_layers import edges_of, random_parts
from tests.parity.scenarios import SCENARIOS
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "pyg.md"

NORMS = {
    "BatchNorm": lambda: pyg.BatchNorm(6),
    "BatchNorm single": lambda: pyg.BatchNorm(6, allow_single_element=True),
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(6, 3),
    "GraphNorm": lambda: pyg.GraphNorm(6),
    "GraphSizeNorm": lambda: pyg.GraphSizeNorm(),
    "HeteroBatchNorm": lambda: pyg.HeteroBatchNorm(6, 4),
    "HeteroBatchNorm averaged": lambda: pyg.HeteroBatchNorm(6, 4, momentum=None),
    "HeteroBatchNorm plain": lambda: pyg.HeteroBatchNorm(6, 4, affine=False, track_running_stats=False),
    "HeteroLayerNorm": lambda: pyg.HeteroLayerNorm(6, 4),
    "InstanceNorm": lambda: pyg.InstanceNorm(6, affine=True, track_running_stats=True),
    "InstanceNorm plain": lambda: pyg.InstanceNorm(6),
    "LayerNorm graph": lambda: pyg.LayerNorm(6),
    "LayerNorm node": lambda: pyg.LayerNorm(6, mode="node"),
    "MeanSubtractionNorm": lambda: pyg.MeanSubtractionNorm(),
    "MessageNorm": lambda: pyg.norm.MessageNorm(learn_scale=True),
    "PairNorm": lambda: pyg.PairNorm(),
    "PairNorm individually": lambda: pyg.PairNorm(2.0, scale_individually=True),
}
BY_TYPE = ("HeteroBatchNorm", "HeteroLayerNorm")
OF_GRAPHS = ("GraphNorm", "GraphSizeNorm", "InstanceNorm", "LayerNorm", "MeanSubtractionNorm", "PairNorm")
COUNT = 4


def with_special_values(x):
    """(N, 6) with -inf throughout a column, infinities and NaN here and there in the others, and one as it was."""
    x = x.clone()
    x[:, 0], x[::7, 1], x[::3, 2], x[::5, 3], x[::6, 4], x[3, 4] = -inf, -inf, inf, nan, inf, nan
    return x


def graph_of_each(data):
    """Of four graphs one has no nodes, and one few."""
    y = data.nodes["y"][:, 0]
    return torch.where(y < -1, 0, torch.where(y < 0, 1, 3))


def norm_results(graph, data, name, training, several):
    torch.manual_seed(5)
    layer, kind = NORMS[name]().double(), name.split(" ")[0]
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(torch.rand_like(value))
    if dist.is_initialized():
        layer = sar.convert_batchnorm(layer)
    x, batch = data.leaf("x"), graph_of_each(data)
    arguments = ()
    if kind == "MessageNorm":
        arguments = (data.nodes["y"],)
    elif kind in BY_TYPE or several:
        arguments = (batch,)
    layer(x, *arguments)  # moves the running statistics
    layer.train(training)
    out = layer(x, *arguments)
    state = {f"same state {key}": value.double() for key, value in layer.state_dict().items()}
    return {**gradients(out, data, layer, x=x), **state}


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [2, corner(1), corner(3)])
def test_normalisation(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(norm_results, (name, training, False)) for name in NORMS for training in (True, False)]
    cases += [(norm_results, (name, True, True)) for name in NORMS if name.startswith(OF_GRAPHS)]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))


class Deep(nn.Module):
    """Norms before and after layers, one of torch's within a layer's own network, and one that is checkpointed."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([pyg.GraphNorm(6), pyg.BatchNorm(6), pyg.LayerNorm(6)])
        self.edge = pyg.EdgeConv(nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6)))  # over all edges
        self.gin = pyg.GINConv(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)))
        self.block = pyg.DeepGCNLayer(pyg.GCNConv(6, 6), pyg.PairNorm(), nn.ReLU(), block="res+", ckpt_grad=True)

    def forward(self, x, edge_index):
        h = self.gin(self.norms[0](self.edge(x, edge_index)), edge_index)
        h = self.block(self.norms[1](h), edge_index)
        return checkpoint(self.norms[2], h, use_reentrant=False)


def deep(graph, data, compiled):
    torch.manual_seed(5)
    model, x, edges = Deep().double(), data.leaf("x"), edges_of(graph)
    if dist.is_initialized():
        model = deepcopy(sar.convert_batchnorm(model))
        sar.sync_params(model)
    run = torch.compile(model, backend="eager") if compiled and dist.is_initialized() else model
    return gradients(run(x, edges), data, model, x=x)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.processes("torch.compile"))])
@pytest.mark.parametrize("world_size", [2, corner(3)])
def test_a_model_of_many(pool, world_size, compiled):
    parts = random_parts(world_size)
    check(pool, parts, random_data(parts, torch.float64), [(deep, (compiled,))], (1,))


class Scaled(pyg.PairNorm):
    def forward(self, x, batch=None):
        return 2 * super().forward(x, batch)


OVER_NODES = pyg.GraphNorm, pyg.LayerNorm, pyg.InstanceNorm


def unconverted(graph, data):
    """Norm layers that nobody has said anything of are refused by name."""
    edges, x = edges_of(graph), data.nodes["x"]
    kinds = pyg.GraphNorm(6), nn.BatchNorm1d(6), pyg.LayerNorm(6), pyg.InstanceNorm(6), pyg.BatchNorm(6), Scaled()
    for layer in kinds:
        model = nn.ModuleDict({"conv": pyg.GCNConv(6, 6), "norm": layer}).double()
        for call in (sar.sync_params, sar.gather_grads):
            with pytest.raises(ConfigError, match=rf"{call.__name__}: norm.* is a .*convert_batchnorm"):
                call(model)
            sar.recover()
        if isinstance(layer, (*OVER_NODES, Scaled)):  # also in a script that only evaluates
            with pytest.raises(ConfigError, match=r"forward: the model is a .*convert_batchnorm"):
                layer.eval()(x)
            sar.recover()
            assert layer.train()(x, sar.pyg.batch_vector(torch.zeros(len(x)).long())).shape == x.shape
        if isinstance(layer, Scaled):
            with pytest.raises(ConfigError, match="found norm Scaled, whose forward is your own"):
                sar.convert_batchnorm(model)
        sar.convert_batchnorm(model["norm"], distributed=False)
        sar.sync_params(model)
        torch.testing.assert_close(layer(x), type(layer).forward(layer, x), rtol=0, atol=0)
        sar.sync_params(sar.convert_batchnorm(model))
    inner = pyg.EdgeConv(nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6))).double()
    with pytest.raises(ConfigError, match=r"EdgeConv: nn\.1 is a BatchNorm1d"):
        inner(x, edges)
    gen = pyg.GENConv(6, 6, norm="batch").double()
    for frozen in (inner.eval(), gen.eval(), nn.ModuleDict({"conv": gen, "norm": pyg.BatchNorm(6)}).double().eval()):
        frozen.zero_grad()
        sar.sync_params(frozen)
        for layer in frozen.modules():
            if isinstance(layer, pyg.MessagePassing):
                layer(x, edges).sum().backward()  # by running statistics
        sar.gather_grads(frozen)
    sar.sync_params(nn.ModuleList([pyg.LayerNorm(6, mode="node"), sar.convert_batchnorm(pyg.BatchNorm(6))]))
    return {}


@pytest.mark.parametrize("world_size", [2])
def test_norms_that_are_not_converted_are_refused(pool, world_size):
    parts = random_parts(world_size, even=True)
    run_everywhere(pool, parts, random_data(parts, torch.float64), [(unconverted, ())], (1,))


@pytest.mark.parametrize("world_size", [2])
def test_one_node_on_all_workers(pool, world_size):
    parts = SCENARIOS["one node"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(norm_results, ("BatchNorm single", True, False))], (1,))


def test_every_normalisation_is_here():
    assert {name.split(" ")[0] for name in NORMS} == set(pyg.norm.__all__)


def shared(out):
    """A scalar of values that are equal on all workers, for all of them together."""
    workers = sar.world_size() if dist.is_initialized() else 1
    return (out.flatten() * torch.arange(1.0, out.numel() + 1, dtype=out.dtype)).sum() / workers


def tied(x):
    """Many values are 0, all of which take a gradient."""
    return x + (x.clamp(0, 0.2) - x).detach()


def pooled(graph, data, kind, several):
    x = data.leaf("x")
    batch = graph_of_each(data) if several else None
    owner = sar.pyg if dist.is_initialized() else pyg
    if owner is pyg and not several:  # without a batch vector one of equal maxima takes all of the gradient
        batch = torch.zeros(len(x), dtype=torch.int64)
    out = getattr(owner, f"global_{kind}_pool")(tied(x), batch, COUNT if several else None)
    shared(out).backward()
    return {"same out": out, "node x.grad": x.grad}


AGGREGATIONS = {
    "AttentionalAggregation": lambda: aggr.AttentionalAggregation(nn.Linear(6, 1), nn.Linear(6, 4)),
    "AttentionalAggregation mlp": lambda: aggr.AttentionalAggregation(pyg.MLP([6, 3, 1], norm="graph_norm")),
    "DeepSetsAggregation": lambda: aggr.DeepSetsAggregation(nn.Linear(6, 5), nn.Linear(5, 4)),
    "DegreeScalerAggregation": lambda: aggr.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "linear", "attenuation"], torch.ones(5)
    ),
    "MaxAggregation": aggr.MaxAggregation,
    "MeanAggregation": aggr.MeanAggregation,
    "MinAggregation": aggr.MinAggregation,
    "MulAggregation": aggr.MulAggregation,
    "MultiAggregation": lambda: aggr.MultiAggregation(["sum", "std", "softmax", "mul"]),
    "MultiAggregation attn": lambda: aggr.MultiAggregation(
        ["min", "var"], mode="attn", mode_kwargs={"in_channels": 6, "out_channels": 4, "num_heads": 2}
    ),
    "PowerMeanAggregation": lambda: aggr.PowerMeanAggregation(2.0, learn=True, channels=6),
    "Set2Set": lambda: aggr.Set2Set(6, 3),
    "SoftmaxAggregation": lambda: aggr.SoftmaxAggregation(0.5, learn=True, channels=6),
    "SoftmaxAggregation semi": lambda: aggr.SoftmaxAggregation(2.0, semi_grad=True),
    "StdAggregation": aggr.StdAggregation,
    "SumAggregation": aggr.SumAggregation,
    "VarAggregation": aggr.VarAggregation,
    "VariancePreservingAggregation": aggr.VariancePreservingAggregation,
}

REFUSED = {
    "EquilibriumAggregation": lambda: aggr.EquilibriumAggregation(6, 4, [5]),
    "GRUAggregation": lambda: aggr.GRUAggregation(6, 4),
    "GraphMultisetTransformer": lambda: aggr.GraphMultisetTransformer(6, 2),
    "LCMAggregation": lambda: aggr.LCMAggregation(6, 4),
    "LSTMAggregation": lambda: aggr.LSTMAggregation(6, 4),
    "MLPAggregation": lambda: aggr.MLPAggregation(6, 4, 50, num_layers=1),
    "MedianAggregation": aggr.MedianAggregation,
    "PatchTransformerAggregation": lambda: aggr.PatchTransformerAggregation(6, 4, 2, 8, 1),
    "QuantileAggregation": lambda: aggr.QuantileAggregation(0.3),
    "SetTransformerAggregation": lambda: aggr.SetTransformerAggregation(6),
    "SortAggregation": lambda: aggr.SortAggregation(3),
}


def aggregated(graph, data, name, several):
    torch.manual_seed(5)
    layer = AGGREGATIONS[name]().double()
    if dist.is_initialized():
        layer = sar.convert_batchnorm(layer)
    x = data.leaf("x")
    batch = graph_of_each(data) if several else torch.zeros(len(x), dtype=torch.int64)
    index = sar.pyg.batch_vector(batch) if dist.is_initialized() else batch
    out = layer(torch.cat([tied(x[:, :2]), x[:, 2:]], 1), index)
    shared(out).backward()
    return {"same out": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [2])
def test_pooling(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(pooled, (kind, several)) for kind in ("add", "mean", "max") for several in (False, True)]
    cases += [(aggregated, (name, several)) for name in AGGREGATIONS for several in (False, True)]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))


def of_special_values(graph, data, kind, several):
    x = data.leaf("special")
    batch = graph_of_each(data) if several else torch.zeros(len(x), dtype=torch.int64)
    out = getattr(aggr, kind)()(x, sar.pyg.batch_vector(batch) if dist.is_initialized() else batch)
    shared(out).backward()
    return {"same out": out.nan_to_num(5e5), "same undefined": out.isnan().double(), "node x.grad": x.grad}


@pytest.mark.parametrize("world_size", [1, 2])
def test_infinite_and_undefined_values(pool, world_size):
    """By graph and column: all -inf, some of them, inf, NaN, and inf beside NaN; infinite maxima share gradients."""
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts, torch.float64)
    data.nodes["special"] = with_special_values(data.nodes["x"])
    kinds = "MaxAggregation", "MinAggregation", "SumAggregation", "SoftmaxAggregation"
    cases = [(of_special_values, (kind, several)) for kind in kinds for several in (False, True)]
    check(pool, parts, data, cases, (1,))


NEIGHBOURS = ("max_pool_neighbor_x", "avg_pool_neighbor_x")


def pooled_neighbours(graph, data, name):
    x = data.leaf("x")
    out = getattr(pyg.pool, name)(Data(x=x.relu(), edge_index=edges_of(graph), num_nodes=len(x))).x
    return gradients(out, data, x=x)


@pytest.mark.parametrize("world_size", [2])
def test_pooling_of_neighbours(pool, world_size):
    parts = random_parts(world_size)
    cases = [(pooled_neighbours, (name,)) for name in NEIGHBOURS]
    check(pool, parts, random_data(parts, torch.float64), cases, (1,))


COARSENING = {
    "ASAPooling": lambda x, *graph: pyg.ASAPooling(6)(x, *graph),
    "ClusterPooling": lambda x, *graph: pyg.ClusterPooling(6)(x, *graph),
    "EdgePooling": lambda x, *graph: pyg.EdgePooling(6)(x, *graph),
    "MemPooling": lambda x, _, batch: pyg.MemPooling(6, 4, 2, 3)(x, batch),
    "PANPooling": lambda x, edges, batch: pyg.PANPooling(6)(x, edges, batch=batch),
    "SAGPooling": lambda x, edges, batch: pyg.SAGPooling(6)(x, edges, batch=batch),
    "TopKPooling": lambda x, edges, batch: pyg.TopKPooling(6)(x, edges, batch=batch),
    "avg_pool": lambda x, edges, batch: pyg.avg_pool(torch.arange(len(x)) // 2, Data(x, edges, batch=batch)),
    "max_pool": lambda x, edges, batch: pyg.max_pool(torch.arange(len(x)) // 2, Data(x, edges, batch=batch)),
}
OWN_CLUSTERS = {"avg_pool_x", "max_pool_x"}
"""These pool the clusters that a worker gives, of its own nodes."""
COMPILED = {"fps", "graclus", "knn", "knn_graph", "nearest", "radius", "radius_graph", "voxel_grid"}
COMPILED |= {"approx_knn", "approx_knn_graph", *(name for name in pyg.pool.__all__ if name.endswith("KNNIndex"))}
"""These need packages that are not here, and edges that nobody has yet."""


def test_every_pooling_is_here():
    exact = {*NEIGHBOURS, "global_add_pool", "global_max_pool", "global_mean_pool"}
    assert exact | COARSENING.keys() | OWN_CLUSTERS | COMPILED == set(pyg.pool.__all__)
    refused_layers = {kind.__name__ for kind, _ in refused.METHODS if kind in vars(pyg.pool).values()}
    assert COARSENING.keys() == {*refused_layers, "avg_pool", "max_pool"}


def refusals(graph, data):
    x = data.nodes["x"]
    for name, call in COARSENING.items():
        for batch in (sar.pyg.batch_vector(graph_of_each(data), COUNT), None):
            if batch is not None or name != "MemPooling":
                with pytest.raises(GraphError, match="across workers"):
                    call(x, edges_of(graph), batch)
    vector = sar.pyg.batch_vector(graph_of_each(data), COUNT)
    for make in (*REFUSED.values(), lambda: aggr.MultiAggregation(["sum", "median"])):
        with pytest.raises(GraphError, match=r"so it cannot pool graphs across workers"):
            make().double()(x, vector)
        with pytest.raises(GraphError, match="called without index"):
            make().double()(x)
    assert vector.unique().tolist() == [0, 1, 3]
    for operation in (
        lambda: vector + 1,
        lambda: vector[:2] < 1,
        lambda: vector.sort(),
        lambda: vector.unique(return_counts=True),
    ):
        with pytest.raises(GraphError, match="batch vector of graphs across workers"):
            operation()
    return {}


@pytest.mark.parametrize("world_size", [2])
def test_what_is_refused(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    run_everywhere(pool, parts, random_data(parts, torch.float64), [(refusals, ())], (1,))


def names_on_the_page(module):
    """What the table says of a module of `torch_geometric.nn`: exact, and refused."""
    [row] = [row for row in PAGE.read_text().splitlines() if row.startswith(f"| `nn.{module}` |")]
    return [set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")[2:4]]


def test_the_table_in_the_docs_is_of_these():
    assert names_on_the_page("norm") == [set(pyg.norm.__all__), set()]
    assert names_on_the_page("aggr") == [{name.split(" ")[0] for name in AGGREGATIONS}, set(REFUSED)]
    exact = {"global_add_pool", "global_max_pool", "global_mean_pool", *NEIGHBOURS}
    assert names_on_the_page("pool") == [exact, set(COARSENING)]


def test_every_aggregation_is_here():
    known = {name.split(" ")[0] for name in AGGREGATIONS} | REFUSED.keys()
    assert known == set(aggr.__all__) - {"Aggregation"}
    assert REFUSED.keys() == {kind.__name__ for kind, _ in refused.METHODS if kind.__name__ in vars(aggr)}
