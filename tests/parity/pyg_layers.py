"""Every convolution of `torch_geometric.nn.conv` with its options, called alike on one machine and on workers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.nn import aggr

import sar
from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import Data, Results, gradients
from tests.parity.scenarios import scattered

IN, OUT = 6, 4
Call = Callable[[nn.Module, Tensor, Tensor, Data], Tensor]


class Layer(NamedTuple):
    """A layer and how it is called.

    make: builds it.
    call: its arguments by the names in `arguments`; or (layer, x (N, 6), edge index (2, E), data) -> (N, ...).
    """

    make: Callable[[], nn.Module]
    call: str | Call = "x edges"

    def run(self, layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
        if not isinstance(self.call, str):
            return self.call(layer, x, edges, data)
        given = arguments(x, edges, data)
        return layer(*(given[name] for name in self.call.split()))


def arguments(x: Tensor, edges: Tensor, data: Data) -> dict[str, Any]:
    """What layers are called with, by name."""
    y, e = data.nodes["y"], data.edges["e"]
    return {
        "x": x,
        "y": y,
        "xy": (x, y),
        "history": torch.stack([x, y], 1),
        "positions": y[:, :3],
        "normals": y[:, 3:],
        "kinds": (y[:, 0] > 0).long(),
        "edges": edges,
        "w": data.edges["w"].squeeze(1),
        "e": e,
        "e_of_heads": e.unsqueeze(1),
        "pseudo": e[:, :2].sigmoid(),
        "types": (data.edges["w"].squeeze(1) * 10).long() % 3,
    }


def sorted_by_destination(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """By destination, and by the IDs that the edges had in the input, which are one machine's columns."""
    ids = edges.graph.edata["orig_id"] if isinstance(edges, DistributedEdgeIndex) else torch.arange(edges.size(1))
    order = ids.argsort()
    return layer(x, edges[:, order[edges[1][order].argsort(stable=True)]])


def twice(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """The second call takes what the first one has cached."""
    layer(x, edges)
    return layer(2 * x, edges)


def signed(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    positive = data.edges["e"][:, 0] > 0
    return layer(x, edges[:, positive], edges[:, ~positive])


def batched(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """A static graph with features of two moments, (2, N, 6)."""
    return layer(torch.stack([x, data.nodes["y"]]), edges).transpose(0, 1)


def with_weights(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """What attention returns beside its weights, and their sums over in-edges."""
    out, (weighed, alpha) = layer(x, edges, return_attention_weights=True)
    return out * utils.scatter(alpha[:, :1].square(), weighed[1], 0, len(x))


def with_initial_and_weights(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """As `with_weights`, for a layer whose messages keep their weights."""
    out, (weighed, alpha) = layer(x, data.nodes["y"], edges, return_attention_weights=True)
    return out * utils.scatter(alpha.square().unsqueeze(1), weighed[1], 0, len(x))


def replaced(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """Functions of the object in the place of its class's."""
    message, aggregate = layer.message, layer.aggregate
    layer.message = lambda x_j, **given: (x_j * message(x_j, **given)).tanh()
    out = layer(x, edges)
    layer.aggregate = lambda inputs, index, **given: 3 * aggregate(inputs, index, **given)
    return out + layer(x, edges)


def kept_messages(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """A layer whose messages leave something behind."""
    out = layer(x, edges)
    return out + utils.scatter(layer.kept, edges[1], 0, len(x))


def with_any_weights(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    """One weight for all edges, one for each, and one for all again."""
    weight = data.edges["w"].squeeze(1)
    one = torch.full((1,), 2.5, dtype=x.dtype, device=x.device)
    return layer(x, edges, one) + layer(x, edges, weight) * layer(x, edges, one)


def with_lambda(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    lambda_max = torch.tensor(1.7, dtype=x.dtype, device=x.device)
    return layer(x, edges, edge_weight=data.edges["w"].squeeze(1), lambda_max=lambda_max)


class Keeping(pyg.SimpleConv):
    def message(self, x_j: Tensor) -> Tensor:
        self.kept = x_j.sin()
        return x_j * self.kept


class NormalisingParts(pyg.SimpleConv):
    """Names the module that looks at all edges in a comprehension only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(IN // 2)

    def message(self, x_j: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in x_j.split(IN // 2, 1)], 1)


class OfHalves(pyg.GCNConv):
    """Messages see as many columns as decomposed layers give them; `factor` has a default."""

    def message(self, x_j: Tensor, edge_weight: Tensor, factor: float = 2.0) -> Tensor:
        return factor * edge_weight.view(-1, 1) * x_j.softmax(-1)


def gps(norm: str | None) -> nn.Module:
    return pyg.GPSConv(IN, pyg.GCNConv(IN, IN), 2, norm=norm, attn_type="performer", attn_kwargs={"head_channels": 4})


def linear(count: int = IN, out: int = OUT) -> nn.Module:
    return nn.Sequential(nn.Linear(count, 8), nn.Tanh(), nn.Linear(8, out))


DEGREES = torch.tensor([1, 3, 5, 7, 2, 4])


REFUSED: dict[str, Layer] = {
    "GPSConv": Layer(lambda: pyg.GPSConv(IN, pyg.GCNConv(IN, IN), heads=2)),
    "HypergraphConv": Layer(lambda: pyg.HypergraphConv(IN, OUT)),
    "MeshCNNConv": Layer(lambda: pyg.MeshCNNConv(IN, OUT)),
    "SuperGATConv": Layer(lambda: pyg.SuperGATConv(IN, OUT)),  # while it trains
    "WLConv": Layer(lambda: pyg.WLConv(), lambda layer, x, edges, data: layer((x[:, 0] > 0).long(), edges)),
}
"""Layers that raise on a distributed edge index."""

NEED_OTHERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "PANConv": ("torch-sparse", lambda: pyg.PANConv(IN, OUT, 2)(torch.ones(2, IN), torch.tensor([[0], [1]]))),
    "SplineConv": ("pyg-lib", lambda: pyg.SplineConv(IN, OUT, 2, 3)),
    "DynamicEdgeConv": ("pyg-lib", lambda: pyg.DynamicEdgeConv(linear(2 * IN), 3)),
    "GravNetConv": ("pyg-lib", lambda: pyg.GravNetConv(IN, OUT, 3, 3, 3)),
    "XConv": ("pyg-lib", lambda: pyg.XConv(IN, OUT, 3, 3)),
}
"""Layers of compiled packages, which are not tried: the package, and what fails without it. The last three also look
for neighbours among all nodes, which no edge index bounds."""

ELSEWHERE = ("HeteroConv", "HGTConv", "HANConv")
"""Layers of several edge types: test_pyg_hetero.py."""

LAYERS: dict[str, Layer] = {
    **{f"SimpleConv {a}": Layer(lambda a=a: pyg.SimpleConv(a)) for a in ("sum", "mean", "max", "min", "mul")},
    **{f"SimpleConv {a}": Layer(lambda a=a: pyg.SimpleConv(a)) for a in ("std", "var", "median", "softmax")},
    "SimpleConv powermean": Layer(lambda: pyg.SimpleConv(aggr.PowerMeanAggregation(p=3.0))),
    "SimpleConv weighted": Layer(lambda: pyg.SimpleConv("sum", combine_root="cat"), "x edges w"),
    "SimpleConv self_loop": Layer(lambda: pyg.SimpleConv("mean", combine_root="self_loop")),
    "SimpleConv batched": Layer(lambda: pyg.SimpleConv("max"), batched),
    "SimpleConv replaced": Layer(lambda: pyg.SimpleConv(), replaced),
    "SimpleConv keeping": Layer(Keeping, kept_messages),
    "SimpleConv normalising": Layer(NormalisingParts),
    "GCNConv": Layer(lambda: pyg.GCNConv(IN, OUT)),
    "GCNConv weighted": Layer(lambda: pyg.GCNConv(IN, OUT, improved=True), "x edges w"),
    "GCNConv cached": Layer(lambda: pyg.GCNConv(IN, OUT, cached=True), twice),
    "GCNConv no loops": Layer(lambda: pyg.GCNConv(IN, OUT, add_self_loops=False)),
    "GCNConv unnormalised": Layer(lambda: pyg.GCNConv(IN, OUT, normalize=False), "x edges w"),
    "GCNConv batched": Layer(lambda: pyg.GCNConv(IN, OUT), batched),
    "GCNConv default": Layer(lambda: OfHalves(IN, OUT), "x edges w"),
    "GCNConv decomposed": Layer(lambda: OfHalves(IN, OUT, decomposed_layers=2), "x edges w"),
    "GCNConv wide": Layer(lambda: pyg.GCNConv(IN, 8, aggr="mean"), "x edges w"),
    "GCNConv wide cached": Layer(lambda: pyg.GCNConv(IN, 8, cached=True, bias=False), twice),
    "GCNConv wide batched": Layer(lambda: pyg.GCNConv(IN, 8), batched),
    "ChebConv": Layer(lambda: pyg.ChebConv(IN, OUT, 3)),
    "ChebConv greatest": Layer(lambda: pyg.ChebConv(IN, OUT, 3, normalization=None), "x edges w"),
    "ChebConv rw": Layer(lambda: pyg.ChebConv(IN, OUT, 3, normalization="rw"), with_lambda),
    "ChebConv None": Layer(lambda: pyg.ChebConv(IN, OUT, 2, normalization=None), with_lambda),
    "ChebConv wide": Layer(lambda: pyg.ChebConv(IN, 8, 3), "x edges w"),
    "ChebConv of degree 3": Layer(lambda: pyg.ChebConv(IN, OUT, 4, bias=False), "x edges w"),
    "SAGEConv": Layer(lambda: pyg.SAGEConv(IN, OUT)),
    "SAGEConv max": Layer(lambda: pyg.SAGEConv(IN, OUT, aggr="max", project=True, normalize=True)),
    "SAGEConv sum pair": Layer(lambda: pyg.SAGEConv((IN, IN), OUT, aggr="sum"), "xy edges"),
    "SAGEConv lstm": Layer(lambda: pyg.SAGEConv(IN, OUT, aggr="lstm"), sorted_by_destination),
    "SAGEConv project": Layer(lambda: pyg.SAGEConv(IN, OUT, normalize=True, project=True, root_weight=False)),
    "SAGEConv several": Layer(lambda: pyg.SAGEConv(IN, OUT, aggr=["mean", "max", "std"])),
    "SAGEConv equal": Layer(lambda: pyg.SAGEConv(IN, IN, bias=False)),
    "SAGEConv wide": Layer(lambda: pyg.SAGEConv(IN, 8, aggr="sum")),
    "GraphConv": Layer(lambda: pyg.GraphConv(IN, OUT)),
    "GraphConv weighted": Layer(lambda: pyg.GraphConv((IN, IN), OUT, aggr="mean"), "x edges w"),
    "GraphConv any weights": Layer(lambda: pyg.GraphConv(IN, OUT), with_any_weights),
    "GraphConv wide": Layer(lambda: pyg.GraphConv(IN, 8, aggr="mean"), "x edges w"),
    "GatedGraphConv": Layer(lambda: pyg.GatedGraphConv(8, 2), "x edges w"),
    "ResGatedGraphConv": Layer(lambda: pyg.ResGatedGraphConv(IN, OUT)),
    "ResGatedGraphConv edges": Layer(lambda: pyg.ResGatedGraphConv(IN, OUT, edge_dim=6), "x edges e"),
    "GATConv": Layer(lambda: pyg.GATConv(IN, OUT, heads=2)),
    "GATConv mean of heads": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, concat=False, residual=True)),
    "GATConv edges": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, edge_dim=6, fill_value="mean"), "x edges e"),
    "GATConv edges add": Layer(lambda: pyg.GATConv(IN, OUT, edge_dim=6, fill_value="add"), "x edges e"),
    "GATConv pair": Layer(lambda: pyg.GATConv((IN, IN), OUT, heads=2, add_self_loops=False), "xy edges"),
    "GATConv max": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, aggr="max")),
    "GATConv weights": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, add_self_loops=False), with_weights),
    "GATConv slope below 0": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, negative_slope=-0.1)),
    "GATv2Conv": Layer(lambda: pyg.GATv2Conv(IN, OUT, heads=2)),
    "GATv2Conv edges": Layer(lambda: pyg.GATv2Conv(IN, OUT, heads=2, edge_dim=6, share_weights=True), "x edges e"),
    "TransformerConv": Layer(lambda: pyg.TransformerConv(IN, OUT, heads=2)),
    "TransformerConv mean of heads": Layer(lambda: pyg.TransformerConv(IN, OUT, 2, False, True)),
    "TransformerConv no root": Layer(lambda: pyg.TransformerConv(IN, OUT, 3, bias=False, root_weight=False)),
    "TransformerConv pair": Layer(lambda: pyg.TransformerConv((IN, IN), OUT, 2, beta=True), "xy edges"),
    "TransformerConv edges": Layer(lambda: pyg.TransformerConv(IN, OUT, 2, False, True, edge_dim=6), "x edges e"),
    "TransformerConv raw edges": Layer(lambda: pyg.TransformerConv(IN, 6), "x edges e_of_heads"),
    "TransformerConv weights": Layer(lambda: pyg.TransformerConv(IN, OUT, 2), with_weights),
    "TransformerConv max": Layer(lambda: pyg.TransformerConv(IN, OUT, 2, aggr="max")),
    "AGNNConv": Layer(lambda: pyg.AGNNConv()),
    "TAGConv": Layer(lambda: pyg.TAGConv(IN, OUT, 2), "x edges w"),
    "TAGConv unnormalised": Layer(lambda: pyg.TAGConv(IN, OUT, 3, normalize=False)),
    "TAGConv wide": Layer(lambda: pyg.TAGConv(IN, 8, 2)),
    "GINConv": Layer(lambda: pyg.GINConv(linear(), train_eps=True)),
    "GINConv linear": Layer(lambda: pyg.GINConv(nn.Linear(IN, OUT), eps=0.3)),
    "GINConv MLP": Layer(lambda: pyg.GINConv(pyg.MLP([IN, OUT, OUT], norm=None), train_eps=True), "xy edges"),
    "GINConv twice": Layer(lambda: pyg.GINConv(nn.Sequential(*[nn.Linear(IN, IN), nn.Tanh()] * 2))),
    "GINEConv": Layer(lambda: pyg.GINEConv(linear(), edge_dim=6), "x edges e"),
    "ARMAConv": Layer(lambda: pyg.ARMAConv(IN, OUT, 2, 2), "x edges w"),
    "ARMAConv shared": Layer(lambda: pyg.ARMAConv(IN, OUT, 2, 2, shared_weights=True)),
    "SGConv": Layer(lambda: pyg.SGConv(IN, OUT, 2), "x edges w"),
    "SGConv cached": Layer(lambda: pyg.SGConv(IN, OUT, 2, cached=True)),
    "SGConv wide": Layer(lambda: pyg.SGConv(IN, 8, 2, bias=False)),
    "SSGConv": Layer(lambda: pyg.SSGConv(IN, OUT, 0.3, 2), "x edges w"),
    "APPNP": Layer(lambda: pyg.APPNP(3, 0.2), "x edges w"),
    "MFConv": Layer(lambda: pyg.MFConv(IN, OUT, max_degree=4)),
    "RGCNConv": Layer(lambda: pyg.RGCNConv(IN, OUT, 3), "x edges types"),
    "RGCNConv bases": Layer(lambda: pyg.RGCNConv(IN, OUT, 3, num_bases=2, aggr="sum"), "x edges types"),
    "RGCNConv blocks": Layer(lambda: pyg.RGCNConv(IN, OUT, 3, num_blocks=2), "x edges types"),
    "FastRGCNConv": Layer(lambda: pyg.FastRGCNConv(IN, OUT, 3), "x edges types"),
    "FastRGCNConv bases": Layer(lambda: pyg.FastRGCNConv(IN, OUT, 3, num_bases=2), "x edges types"),
    **{
        f"RGATConv {mode} {mechanism}": Layer(
            lambda mode=mode, mechanism=mechanism: pyg.RGATConv(
                IN, OUT, 3, heads=2, num_bases=2, attention_mode=mode, attention_mechanism=mechanism, edge_dim=6
            ),
            "x edges types e",
        )
        for mode, mechanism in [
            ("additive-self-attention", "within-relation"),
            ("multiplicative-self-attention", "across-relation"),
            ("additive-self-attention", "across-relation"),
        ]
    },
    "RGATConv f-scaled": Layer(
        lambda: pyg.RGATConv(IN, OUT, 3, mod="f-scaled", num_blocks=2, heads=2), "x edges types"
    ),
    "SignedConv": Layer(lambda: pyg.SignedConv(IN, OUT, True), signed),
    "DNAConv": Layer(lambda: pyg.DNAConv(IN, heads=2), "history edges"),
    "PointNetConv": Layer(lambda: pyg.PointNetConv(linear(IN + 3), linear(OUT)), "x positions edges"),
    "GMMConv": Layer(lambda: pyg.GMMConv(IN, OUT, 2, 3), "x edges pseudo"),
    "GMMConv separate": Layer(lambda: pyg.GMMConv(IN, OUT, 2, 3, separate_gaussians=True), "x edges pseudo"),
    "NNConv": Layer(lambda: pyg.NNConv(IN, OUT, linear(6, IN * OUT), aggr="mean"), "x edges e"),
    "CGConv": Layer(lambda: pyg.CGConv(IN, 6), "x edges e"),
    "CGConv batch norm": Layer(lambda: pyg.CGConv(IN, 6, batch_norm=True), "x edges e"),
    "EdgeConv": Layer(lambda: pyg.EdgeConv(linear(2 * IN))),
    "EdgeConv batch norm": Layer(
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * IN, OUT), nn.BatchNorm1d(OUT), nn.ReLU()))
    ),
    "PPFConv": Layer(lambda: pyg.PPFConv(linear(IN + 4), linear(OUT)), "x positions normals edges"),
    "FeaStConv": Layer(lambda: pyg.FeaStConv(IN, OUT, heads=2)),
    "PointTransformerConv": Layer(lambda: pyg.PointTransformerConv(IN, OUT, attn_nn=linear(OUT)), "x positions edges"),
    "LEConv": Layer(lambda: pyg.LEConv(IN, OUT)),
    "LEConv weighted": Layer(lambda: pyg.LEConv((IN, IN), OUT, bias=False), "xy edges w"),
    "LEConv mean": Layer(lambda: pyg.LEConv(IN, OUT, aggr="mean"), "x edges w"),
    "LEConv max": Layer(lambda: pyg.LEConv(IN, OUT, aggr="max"), "x edges w"),
    "PNAConv": Layer(
        lambda: pyg.PNAConv(
            IN, OUT, ["mean", "min", "max", "std"], ["identity", "amplification", "linear"], DEGREES, edge_dim=6
        ),
        "x edges e",
    ),
    "PNAConv towers": Layer(
        lambda: pyg.PNAConv(IN, OUT, ["sum", "var"], ["attenuation"], DEGREES, towers=2, divide_input=True)
    ),
    "ClusterGCNConv": Layer(lambda: pyg.ClusterGCNConv(IN, OUT, diag_lambda=0.3)),
    "GENConv softmax": Layer(lambda: pyg.GENConv(IN, OUT, aggr="softmax", learn_t=True, edge_dim=6), "x edges e"),
    "GENConv powermean": Layer(lambda: pyg.GENConv(IN, OUT, aggr="powermean", learn_p=True, norm="layer")),
    "GENConv mean": Layer(lambda: pyg.GENConv(IN, OUT, aggr="mean", norm="layer")),
    "GENConv max": Layer(lambda: pyg.GENConv(IN, OUT, aggr="max", msg_norm=True)),
    "GCN2Conv": Layer(lambda: pyg.GCN2Conv(IN, 0.1, 0.5, 1), "x y edges w"),
    "GCN2Conv not shared": Layer(lambda: pyg.GCN2Conv(IN, 0.1, shared_weights=False), "x y edges"),
    "WLConvContinuous": Layer(lambda: pyg.WLConvContinuous(), "x edges w"),
    "FiLMConv": Layer(lambda: pyg.FiLMConv(IN, OUT, 3), "x edges types"),
    "SuperGATConv MX eval": Layer(lambda: pyg.SuperGATConv(IN, OUT, heads=2)),
    "SuperGATConv SD eval": Layer(lambda: pyg.SuperGATConv(IN, OUT, heads=2, attention_type="SD")),
    "FAConv": Layer(lambda: pyg.FAConv(IN), "x y edges"),
    "FAConv unnormalised": Layer(lambda: pyg.FAConv(IN, normalize=False), "x y edges w"),
    "FAConv weights": Layer(lambda: pyg.FAConv(IN), with_initial_and_weights),
    "EGConv": Layer(lambda: pyg.EGConv(IN, OUT, num_heads=2)),
    "EGConv several": Layer(lambda: pyg.EGConv(IN, OUT, ["mean", "max", "std", "symnorm"], num_heads=2)),
    "PDNConv": Layer(lambda: pyg.PDNConv(IN, OUT, 6, 5), "x edges e"),
    "GeneralConv": Layer(lambda: pyg.GeneralConv(IN, OUT, 6), "x edges e"),
    "GeneralConv additive": Layer(lambda: pyg.GeneralConv(IN, OUT, attention=True, l2_normalize=True)),
    "GeneralConv attention": Layer(
        lambda: pyg.GeneralConv(IN, OUT, 6, attention=True, heads=2, attention_type="dot_product"), "x edges e"
    ),
    "HEATConv": Layer(lambda: pyg.HEATConv(IN, OUT, 2, 3, 5, 6, 7, heads=2), "x edges kinds types e"),
    "GPSConv performer batch norm": Layer(lambda: gps("batch_norm")),
    "GPSConv performer graph norm": Layer(lambda: gps("graph_norm")),
    "LGConv": Layer(lambda: pyg.LGConv(), "x edges w"),
    "PointGNNConv": Layer(
        lambda: pyg.PointGNNConv(linear(IN, 3), linear(3 + IN), linear(OUT, IN)), "x positions edges"
    ),
    "AntiSymmetricConv": Layer(lambda: pyg.AntiSymmetricConv(IN, num_iters=2)),
    "DirGNNConv": Layer(lambda: pyg.DirGNNConv(pyg.GCNConv(IN, OUT))),
    "models.GCN": Layer(lambda: pyg.models.GCN(IN, 8, 2, OUT, jk="cat")),
    "models.GAT": Layer(lambda: pyg.models.GAT(IN, 8, 2, OUT, v2=True, heads=2, norm="layer_norm")),
    "models.GIN": Layer(lambda: pyg.models.GIN(IN, 8, 2, OUT, norm="batch_norm")),
    "MixHopConv": Layer(lambda: pyg.MixHopConv(IN, OUT), "x edges w"),
}


def edges_of(graph: Any) -> Tensor:
    """The edge index of a graph, distributed or on one machine."""
    return sar.pyg.edge_index(graph) if dist.is_initialized() else torch.stack(graph.edges())


def layer_results(graph: Any, data: Data, name: str, change: Callable[[Any], Any] = lambda layer: None) -> Results:
    """The layer's output and the gradients of its input and parameters, after a change of the layer."""
    torch.manual_seed(3)
    layer = LAYERS[name].make().to(data.nodes["x"]).train(not name.endswith("eval"))
    change(layer)
    if dist.is_initialized():
        sar.convert_batchnorm(layer)
    x = data.leaf("x")
    return gradients(LAYERS[name].run(layer, x, edges_of(graph), data), data, layer, x=x)


def random_parts(workers: int, *, even: bool = False) -> Any:
    """A graph with self-loops, parallel edges and a node without in-edges, cut at random, or with nodes for each."""
    assignment = torch.arange(30) % workers if even else scattered(30, workers)
    return partition_in_memory(random_graph(8, 30, 150, no_in_edges=1), assignment, workers)
