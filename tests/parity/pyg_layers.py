"""Every convolution of `torch_geometric.nn.conv` with its options, called alike on one machine and on workers.

python -m tests.parity.pyg_layers        # runs all of them, and writes the table of docs/pyg_layers.md
"""

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
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
from tests.parity.harness import MODES, Data, Results, check, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import scattered
from tests.workers import REPOSITORY, WorkerPool

IN, OUT = 6, 4
Call = Callable[[nn.Module, Tensor, Tensor, Data], Tensor]


class Layer(NamedTuple):
    """make: builds the layer; call: (layer, x (N, 6), edge index (2, E), data) -> (N, ...)."""

    make: Callable[[], nn.Module]
    call: Call


def plain(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges)


def weighted(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges, data.edges["w"].squeeze(1))


def with_edges(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges, data.edges["e"])


def with_pseudo(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges, data.edges["e"][:, :2].sigmoid())


def edge_types(data: Data) -> Tensor:
    return (data.edges["w"].squeeze(1) * 10).long() % 3


def with_types(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges, edge_types(data))


def with_types_and_edges(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges, edge_types(data), data.edges["e"])


def with_initial(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, data.nodes["y"], edges)


def with_initial_and_weight(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, data.nodes["y"], edges, data.edges["w"].squeeze(1))


def with_positions(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, data.nodes["y"][:, :3], edges)


def with_normals(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, data.nodes["y"][:, :3], data.nodes["y"][:, 3:], edges)


def with_pair(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer((x, data.nodes["y"]), edges)


def with_pair_and_weight(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer((x, data.nodes["y"]), edges, data.edges["w"].squeeze(1))


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


def of_history(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(torch.stack([x, data.nodes["y"]], 1), edges)


def of_node_types(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    kinds = (data.nodes["y"][:, 0] > 0).long()
    return layer(x, edges, kinds, edge_types(data), data.edges["e"])


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


def with_edges_of_heads(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges, data.edges["e"].unsqueeze(1))


def with_lambda(layer: nn.Module, x: Tensor, edges: Tensor, data: Data) -> Tensor:
    return layer(x, edges, data.edges["w"].squeeze(1), lambda_max=torch.tensor(1.7, dtype=x.dtype, device=x.device))


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
    "GPSConv": Layer(lambda: pyg.GPSConv(IN, pyg.GCNConv(IN, IN), heads=2), plain),
    "HypergraphConv": Layer(lambda: pyg.HypergraphConv(IN, OUT), plain),
    "MeshCNNConv": Layer(lambda: pyg.MeshCNNConv(IN, OUT), plain),
    "SuperGATConv": Layer(lambda: pyg.SuperGATConv(IN, OUT), plain),  # while it trains
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
    **{f"SimpleConv {a}": Layer(lambda a=a: pyg.SimpleConv(a), plain) for a in ("sum", "mean", "max", "min", "mul")},
    **{f"SimpleConv {a}": Layer(lambda a=a: pyg.SimpleConv(a), plain) for a in ("std", "var", "median", "softmax")},
    "SimpleConv powermean": Layer(lambda: pyg.SimpleConv(aggr.PowerMeanAggregation(p=3.0)), plain),
    "SimpleConv weighted": Layer(lambda: pyg.SimpleConv("sum", combine_root="cat"), weighted),
    "SimpleConv self_loop": Layer(lambda: pyg.SimpleConv("mean", combine_root="self_loop"), plain),
    "SimpleConv batched": Layer(lambda: pyg.SimpleConv("max"), batched),
    "SimpleConv replaced": Layer(lambda: pyg.SimpleConv(), replaced),
    "SimpleConv keeping": Layer(Keeping, kept_messages),
    "SimpleConv normalising": Layer(NormalisingParts, plain),
    "GCNConv": Layer(lambda: pyg.GCNConv(IN, OUT), plain),
    "GCNConv weighted": Layer(lambda: pyg.GCNConv(IN, OUT, improved=True), weighted),
    "GCNConv cached": Layer(lambda: pyg.GCNConv(IN, OUT, cached=True), twice),
    "GCNConv no loops": Layer(lambda: pyg.GCNConv(IN, OUT, add_self_loops=False), plain),
    "GCNConv unnormalised": Layer(lambda: pyg.GCNConv(IN, OUT, normalize=False), weighted),
    "GCNConv batched": Layer(lambda: pyg.GCNConv(IN, OUT), batched),
    "GCNConv default": Layer(lambda: OfHalves(IN, OUT), weighted),
    "GCNConv decomposed": Layer(lambda: OfHalves(IN, OUT, decomposed_layers=2), weighted),
    "ChebConv": Layer(lambda: pyg.ChebConv(IN, OUT, 3), plain),
    "ChebConv greatest": Layer(lambda: pyg.ChebConv(IN, OUT, 3, normalization=None), weighted),
    "ChebConv rw": Layer(lambda: pyg.ChebConv(IN, OUT, 3, normalization="rw"), with_lambda),
    "ChebConv None": Layer(lambda: pyg.ChebConv(IN, OUT, 2, normalization=None), with_lambda),
    "SAGEConv": Layer(lambda: pyg.SAGEConv(IN, OUT), plain),
    "SAGEConv max": Layer(lambda: pyg.SAGEConv(IN, OUT, aggr="max", project=True, normalize=True), plain),
    "SAGEConv sum pair": Layer(lambda: pyg.SAGEConv((IN, IN), OUT, aggr="sum"), with_pair),
    "SAGEConv lstm": Layer(lambda: pyg.SAGEConv(IN, OUT, aggr="lstm"), sorted_by_destination),
    "SAGEConv project": Layer(lambda: pyg.SAGEConv(IN, OUT, normalize=True, project=True, root_weight=False), plain),
    "SAGEConv several": Layer(lambda: pyg.SAGEConv(IN, OUT, aggr=["mean", "max", "std"]), plain),
    "GraphConv": Layer(lambda: pyg.GraphConv(IN, OUT), plain),
    "GraphConv weighted": Layer(lambda: pyg.GraphConv((IN, IN), OUT, aggr="mean"), weighted),
    "GraphConv any weights": Layer(lambda: pyg.GraphConv(IN, OUT), with_any_weights),
    "GatedGraphConv": Layer(lambda: pyg.GatedGraphConv(8, 2), weighted),
    "ResGatedGraphConv": Layer(lambda: pyg.ResGatedGraphConv(IN, OUT), plain),
    "ResGatedGraphConv edges": Layer(lambda: pyg.ResGatedGraphConv(IN, OUT, edge_dim=6), with_edges),
    "GATConv": Layer(lambda: pyg.GATConv(IN, OUT, heads=2), plain),
    "GATConv mean of heads": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, concat=False, residual=True), plain),
    "GATConv edges": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, edge_dim=6, fill_value="mean"), with_edges),
    "GATConv edges add": Layer(lambda: pyg.GATConv(IN, OUT, edge_dim=6, fill_value="add"), with_edges),
    "GATConv pair": Layer(lambda: pyg.GATConv((IN, IN), OUT, heads=2, add_self_loops=False), with_pair),
    "GATConv max": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, aggr="max"), plain),
    "GATConv weights": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, add_self_loops=False), with_weights),
    "GATConv slope below 0": Layer(lambda: pyg.GATConv(IN, OUT, heads=2, negative_slope=-0.1), plain),
    "GATv2Conv": Layer(lambda: pyg.GATv2Conv(IN, OUT, heads=2), plain),
    "GATv2Conv edges": Layer(lambda: pyg.GATv2Conv(IN, OUT, heads=2, edge_dim=6, share_weights=True), with_edges),
    "TransformerConv": Layer(lambda: pyg.TransformerConv(IN, OUT, heads=2), plain),
    "TransformerConv mean of heads": Layer(lambda: pyg.TransformerConv(IN, OUT, 2, False, True), plain),
    "TransformerConv no root": Layer(lambda: pyg.TransformerConv(IN, OUT, 3, bias=False, root_weight=False), plain),
    "TransformerConv pair": Layer(lambda: pyg.TransformerConv((IN, IN), OUT, 2, beta=True), with_pair),
    "TransformerConv edges": Layer(lambda: pyg.TransformerConv(IN, OUT, 2, False, True, edge_dim=6), with_edges),
    "TransformerConv raw edges": Layer(lambda: pyg.TransformerConv(IN, 6), with_edges_of_heads),
    "TransformerConv weights": Layer(lambda: pyg.TransformerConv(IN, OUT, 2), with_weights),
    "TransformerConv max": Layer(lambda: pyg.TransformerConv(IN, OUT, 2, aggr="max"), plain),
    "AGNNConv": Layer(lambda: pyg.AGNNConv(), plain),
    "TAGConv": Layer(lambda: pyg.TAGConv(IN, OUT, 2), weighted),
    "GINConv": Layer(lambda: pyg.GINConv(linear(), train_eps=True), plain),
    "GINEConv": Layer(lambda: pyg.GINEConv(linear(), edge_dim=6), with_edges),
    "ARMAConv": Layer(lambda: pyg.ARMAConv(IN, OUT, 2, 2), weighted),
    "ARMAConv shared": Layer(lambda: pyg.ARMAConv(IN, OUT, 2, 2, shared_weights=True), plain),
    "SGConv": Layer(lambda: pyg.SGConv(IN, OUT, 2), weighted),
    "SGConv cached": Layer(lambda: pyg.SGConv(IN, OUT, 2, cached=True), plain),
    "SSGConv": Layer(lambda: pyg.SSGConv(IN, OUT, 0.3, 2), weighted),
    "APPNP": Layer(lambda: pyg.APPNP(3, 0.2), weighted),
    "MFConv": Layer(lambda: pyg.MFConv(IN, OUT, max_degree=4), plain),
    "RGCNConv": Layer(lambda: pyg.RGCNConv(IN, OUT, 3), with_types),
    "RGCNConv bases": Layer(lambda: pyg.RGCNConv(IN, OUT, 3, num_bases=2, aggr="sum"), with_types),
    "RGCNConv blocks": Layer(lambda: pyg.RGCNConv(IN, OUT, 3, num_blocks=2), with_types),
    "FastRGCNConv": Layer(lambda: pyg.FastRGCNConv(IN, OUT, 3), with_types),
    "FastRGCNConv bases": Layer(lambda: pyg.FastRGCNConv(IN, OUT, 3, num_bases=2), with_types),
    **{
        f"RGATConv {mode} {mechanism}": Layer(
            lambda mode=mode, mechanism=mechanism: pyg.RGATConv(
                IN, OUT, 3, heads=2, num_bases=2, attention_mode=mode, attention_mechanism=mechanism, edge_dim=6
            ),
            with_types_and_edges,
        )
        for mode, mechanism in [
            ("additive-self-attention", "within-relation"),
            ("multiplicative-self-attention", "across-relation"),
            ("additive-self-attention", "across-relation"),
        ]
    },
    "RGATConv f-scaled": Layer(lambda: pyg.RGATConv(IN, OUT, 3, mod="f-scaled", num_blocks=2, heads=2), with_types),
    "SignedConv": Layer(lambda: pyg.SignedConv(IN, OUT, True), signed),
    "DNAConv": Layer(lambda: pyg.DNAConv(IN, heads=2), of_history),
    "PointNetConv": Layer(lambda: pyg.PointNetConv(linear(IN + 3), linear(OUT)), with_positions),
    "GMMConv": Layer(lambda: pyg.GMMConv(IN, OUT, 2, 3), with_pseudo),
    "GMMConv separate": Layer(lambda: pyg.GMMConv(IN, OUT, 2, 3, separate_gaussians=True), with_pseudo),
    "NNConv": Layer(lambda: pyg.NNConv(IN, OUT, linear(6, IN * OUT), aggr="mean"), with_edges),
    "CGConv": Layer(lambda: pyg.CGConv(IN, 6), with_edges),
    "CGConv batch norm": Layer(lambda: pyg.CGConv(IN, 6, batch_norm=True), with_edges),
    "EdgeConv": Layer(lambda: pyg.EdgeConv(linear(2 * IN)), plain),
    "EdgeConv batch norm": Layer(
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * IN, OUT), nn.BatchNorm1d(OUT), nn.ReLU())), plain
    ),
    "PPFConv": Layer(lambda: pyg.PPFConv(linear(IN + 4), linear(OUT)), with_normals),
    "FeaStConv": Layer(lambda: pyg.FeaStConv(IN, OUT, heads=2), plain),
    "PointTransformerConv": Layer(lambda: pyg.PointTransformerConv(IN, OUT, attn_nn=linear(OUT)), with_positions),
    "LEConv": Layer(lambda: pyg.LEConv(IN, OUT), plain),
    "LEConv weighted": Layer(lambda: pyg.LEConv((IN, IN), OUT, bias=False), with_pair_and_weight),
    "LEConv mean": Layer(lambda: pyg.LEConv(IN, OUT, aggr="mean"), weighted),
    "LEConv max": Layer(lambda: pyg.LEConv(IN, OUT, aggr="max"), weighted),
    "PNAConv": Layer(
        lambda: pyg.PNAConv(
            IN, OUT, ["mean", "min", "max", "std"], ["identity", "amplification", "linear"], DEGREES, edge_dim=6
        ),
        with_edges,
    ),
    "PNAConv towers": Layer(
        lambda: pyg.PNAConv(IN, OUT, ["sum", "var"], ["attenuation"], DEGREES, towers=2, divide_input=True), plain
    ),
    "ClusterGCNConv": Layer(lambda: pyg.ClusterGCNConv(IN, OUT, diag_lambda=0.3), plain),
    "GENConv softmax": Layer(lambda: pyg.GENConv(IN, OUT, aggr="softmax", learn_t=True, edge_dim=6), with_edges),
    "GENConv powermean": Layer(lambda: pyg.GENConv(IN, OUT, aggr="powermean", learn_p=True, norm="layer"), plain),
    "GENConv mean": Layer(lambda: pyg.GENConv(IN, OUT, aggr="mean", norm="layer"), plain),
    "GENConv max": Layer(lambda: pyg.GENConv(IN, OUT, aggr="max", msg_norm=True), plain),
    "GCN2Conv": Layer(lambda: pyg.GCN2Conv(IN, 0.1, 0.5, 1), with_initial_and_weight),
    "GCN2Conv not shared": Layer(lambda: pyg.GCN2Conv(IN, 0.1, shared_weights=False), with_initial),
    "WLConvContinuous": Layer(lambda: pyg.WLConvContinuous(), weighted),
    "FiLMConv": Layer(lambda: pyg.FiLMConv(IN, OUT, 3), with_types),
    "SuperGATConv MX eval": Layer(lambda: pyg.SuperGATConv(IN, OUT, heads=2), plain),
    "SuperGATConv SD eval": Layer(lambda: pyg.SuperGATConv(IN, OUT, heads=2, attention_type="SD"), plain),
    "FAConv": Layer(lambda: pyg.FAConv(IN), with_initial),
    "FAConv unnormalised": Layer(lambda: pyg.FAConv(IN, normalize=False), with_initial_and_weight),
    "FAConv weights": Layer(lambda: pyg.FAConv(IN), with_initial_and_weights),
    "EGConv": Layer(lambda: pyg.EGConv(IN, OUT, num_heads=2), plain),
    "EGConv several": Layer(lambda: pyg.EGConv(IN, OUT, ["mean", "max", "std", "symnorm"], num_heads=2), plain),
    "PDNConv": Layer(lambda: pyg.PDNConv(IN, OUT, 6, 5), with_edges),
    "GeneralConv": Layer(lambda: pyg.GeneralConv(IN, OUT, 6), with_edges),
    "GeneralConv additive": Layer(lambda: pyg.GeneralConv(IN, OUT, attention=True, l2_normalize=True), plain),
    "GeneralConv attention": Layer(
        lambda: pyg.GeneralConv(IN, OUT, 6, attention=True, heads=2, attention_type="dot_product"), with_edges
    ),
    "HEATConv": Layer(lambda: pyg.HEATConv(IN, OUT, 2, 3, 5, 6, 7, heads=2), of_node_types),
    "GPSConv performer batch norm": Layer(lambda: gps("batch_norm"), plain),
    "GPSConv performer graph norm": Layer(lambda: gps("graph_norm"), plain),
    "LGConv": Layer(lambda: pyg.LGConv(), weighted),
    "PointGNNConv": Layer(lambda: pyg.PointGNNConv(linear(IN, 3), linear(3 + IN), linear(OUT, IN)), with_positions),
    "AntiSymmetricConv": Layer(lambda: pyg.AntiSymmetricConv(IN, num_iters=2), plain),
    "DirGNNConv": Layer(lambda: pyg.DirGNNConv(pyg.GCNConv(IN, OUT)), plain),
    "models.GCN": Layer(lambda: pyg.models.GCN(IN, 8, 2, OUT, jk="cat"), plain),
    "models.GAT": Layer(lambda: pyg.models.GAT(IN, 8, 2, OUT, v2=True, heads=2, norm="layer_norm"), plain),
    "models.GIN": Layer(lambda: pyg.models.GIN(IN, 8, 2, OUT, norm="batch_norm"), plain),
    "MixHopConv": Layer(lambda: pyg.MixHopConv(IN, OUT), weighted),
}


def edges_of(graph: Any) -> Tensor:
    """The edge index of a graph, distributed or on one machine."""
    return sar.pyg.edge_index(graph) if dist.is_initialized() else torch.stack(graph.edges())


def layer_results(graph: Any, data: Data, name: str) -> Results:
    """The layer's output and the gradients of its input and parameters."""
    torch.manual_seed(3)
    layer = LAYERS[name].make().to(data.nodes["x"])
    if name.endswith("eval"):
        layer.eval()
    if dist.is_initialized():
        sar.pyg.convert_norms(layer)
    x = data.leaf("x")
    out = LAYERS[name].call(layer, x, edges_of(graph), data)
    if not out.is_floating_point():
        return {"node out": out.double()}
    weighted_sum(out, data.nodes["cotangent"].repeat(1, 6)).backward()
    return {"node out": out, "node x.grad": x.grad, **parameter_gradients(layer)}


def random_parts(workers: int, *, even: bool = False) -> Any:
    """A graph with self-loops, parallel edges and a node without in-edges, cut at random, or with nodes for each."""
    assignment = torch.arange(30) % workers if even else scattered(30, workers)
    return partition_in_memory(random_graph(8, 30, 150, no_in_edges=1), assignment, workers)


PAGE = REPOSITORY / "docs" / "pyg_layers.md"
BEGIN, END = "<!-- written by tests/parity/pyg_layers.py -->\n", "<!-- end -->\n"


def table(ran: Mapping[str, list[int]]) -> str:
    """The table, in Markdown, of layers with the same options; options are followed by modes that did not run."""
    options: dict[str, list[str]] = {}
    for name in LAYERS:
        layer, _, option = name.partition(" ")
        absent = ", ".join(str(mode) for mode in MODES if mode not in ran[name])
        options.setdefault(layer, []).append((option or "plain") + f" (not in mode {absent})" * bool(absent))
    layers: dict[str, list[str]] = {}
    for layer, cases in options.items():
        layers.setdefault("; ".join(cases), []).append(layer)
    rows = [("layers", "options"), ("---", "---"), *((", ".join(names), cases) for cases, names in layers.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_table() -> None:
    """Run every layer on two and three workers in three modes, and replace the written part of the page."""
    ran = {name: list(MODES) for name in LAYERS}
    for workers in (2, 3):
        pool, parts = WorkerPool(workers), random_parts(workers)
        data = random_data(parts, torch.float64)
        for name in LAYERS:
            for mode in MODES:
                try:
                    check(pool, parts, data, [(layer_results, (name,))], (mode,), timeout=200)
                except AssertionError as error:
                    print(name, mode, workers, error)
                    ran[name] = [each for each in ran[name] if each != mode]
        pool.close()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch_geometric", "torch", "numba"))
    made = f"Made with {versions} and Python {platform.python_version()}, on 2 and 3 workers.\n\n"
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made}{table(ran)}{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write_table()
