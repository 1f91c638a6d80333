"""Every convolution of `dgl.nn.pytorch.conv` with its options, called alike on DGL's graph and on sar's."""

from collections.abc import Callable
from dataclasses import dataclass

import dgl.nn.pytorch as dglnn
import torch
from torch import Tensor, nn

from tests.parity.harness import Data, Results, parameter_gradients, weighted_sum

IN, OUT = 6, 4


@dataclass(frozen=True)
class Conv:
    """A layer and how it is called.

    make: builds the layer.
    call: (layer, graph, x (N, 6), w (E, 1), data) -> output, or several.
    blocks: whether the layer takes bipartite graphs, so that it runs on message flow graphs.
    """

    make: Callable[[], nn.Module]
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    blocks: bool = True


def plain(layer, graph, x, w, data):
    return layer(graph, x)


def weighted(layer, graph, x, w, data):
    return layer(graph, x, edge_weight=w.squeeze(1))


def with_edges(layer, graph, x, w, data):
    return layer(graph, x, data.edges["e"].to(x.dtype) * w)


def with_types(layer, graph, x, w, data):
    return layer(graph, x, edge_types(data))


def with_norm(layer, graph, x, w, data):
    return layer(graph, x, edge_types(data), norm=w)


def normalised_weight(layer, graph, x, w, data):
    return layer(graph, x, edge_weight=dglnn.EdgeWeightNorm("right")(graph, w.squeeze(1)))


def edge_types(data: Data) -> Tensor:
    """Three edge types, (E,) int64, of a fixed pattern."""
    return (data.edges["e"][:, 0] * 10).long().abs() % 3


def node_types(data: Data) -> Tensor:
    """Two node types, (N,) int64."""
    return (data.nodes["y"][:, 0] > 0).long()


def per_edge_matrix(e: Tensor) -> Tensor:
    return e.repeat(1, OUT)


def _distances(layer, graph, x, w, data):
    return layer(graph, x[:, :1], w)


def _pseudo(layer, graph, x, w, data):
    return layer(graph, x, data.edges["e"][:, :2].to(x.dtype) * w)


def _two_outputs(layer, graph, x, w, data):
    return layer(graph, x, data.nodes["y"][:, :3], data.edges["e"] * w)


def _typed_nodes(layer, graph, x, w, data):
    return layer(graph, x, node_types(data), edge_types(data))


def _residual(layer, graph, x, w, data):
    return layer(graph, x, data.nodes["y"])


def _eigenvectors(layer, graph, x, w, data):
    return layer(graph, x, eig_vec=data.nodes["y"][:, :2])


def _lambda(layer, graph, x, w, data):
    return layer(graph, x, torch.tensor([1.7], dtype=x.dtype))


def _labels(layer, graph, x, w, data):
    return layer(graph, node_types(data), data.nodes["y"][:, 1] > 0)


def _sg(norm: object = None) -> nn.Module:
    return dglnn.SGConv(IN, OUT, k=2, norm=norm, allow_zero_in_degree=True)


def _twirls(**options: object) -> nn.Module:
    return dglnn.TWIRLSConv(IN, OUT, 8, prop_step=4, **options)


def _pna(**options: object) -> nn.Module:
    aggregators = ["mean", "max", "min", "sum", "std", "var", "moment3"]
    scalers = ["identity", "amplification", "attenuation"]
    return dglnn.PNAConv(IN, OUT, aggregators, scalers, 2.5, **options).eval()


def _dgn() -> nn.Module:
    return dglnn.DGNConv(IN, OUT, ["dir1-av", "dir1-dx", "sum"], ["identity", "amplification"], 2.5).eval()


def _atomic() -> nn.Module:
    cutoffs = torch.tensor([3.0, 4.0])
    return dglnn.AtomicConv(cutoffs, torch.tensor([0.0, 1.0]), torch.tensor([4.0, 4.0]))


CONVS = {
    "EdgeWeightNorm both": Conv(
        lambda: dglnn.GraphConv(IN, OUT, norm="none", allow_zero_in_degree=True),
        lambda layer, graph, x, w, data: layer(graph, x, edge_weight=dglnn.EdgeWeightNorm("both")(graph, w.squeeze(1))),
        blocks=False,
    ),
    "EdgeWeightNorm right": Conv(
        lambda: dglnn.GraphConv(IN, OUT, norm="none", allow_zero_in_degree=True), normalised_weight, blocks=False
    ),
    "RelGraphConv": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3), with_types, blocks=False),
    "RelGraphConv basis": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3, "basis", 2), with_types, blocks=False),
    "RelGraphConv bdd": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3, "bdd", 2), with_types, blocks=False),
    "RelGraphConv layer_norm": Conv(
        lambda: dglnn.RelGraphConv(IN, OUT, 3, layer_norm=True, self_loop=False), with_norm, blocks=False
    ),
    "TAGConv": Conv(lambda: dglnn.TAGConv(IN, OUT), plain, blocks=False),
    "TAGConv weighted": Conv(lambda: dglnn.TAGConv(IN, OUT), weighted, blocks=False),
    "GATv2Conv": Conv(lambda: dglnn.GATv2Conv(IN, 2, 3, allow_zero_in_degree=True), plain),
    "GATv2Conv residual": Conv(
        lambda: dglnn.GATv2Conv(IN, 2, 3, residual=True, share_weights=True, allow_zero_in_degree=True), plain
    ),
    "GATv2Conv attention": Conv(
        lambda: dglnn.GATv2Conv(IN, 2, 3, allow_zero_in_degree=True),
        lambda layer, graph, x, w, data: layer(graph, x, get_attention=True),
    ),
    "EGATConv": Conv(lambda: dglnn.EGATConv(IN, 6, 2, 3, 2), with_edges),
    "EGATConv weighted": Conv(
        lambda: dglnn.EGATConv(IN, 6, 2, 3, 2),
        lambda layer, graph, x, w, data: layer(graph, x, data.edges["e"], edge_weight=w.squeeze(1)),
    ),
    "EdgeGATConv": Conv(lambda: dglnn.EdgeGATConv(IN, 6, 2, 2, allow_zero_in_degree=True), with_edges),
    "EdgeConv": Conv(lambda: dglnn.EdgeConv(IN, OUT, allow_zero_in_degree=True), plain),
    "EdgeConv batch_norm": Conv(lambda: dglnn.EdgeConv(IN, OUT, batch_norm=True, allow_zero_in_degree=True), plain),
    "SAGEConv lstm": Conv(lambda: dglnn.SAGEConv(IN, OUT, "lstm"), plain),
    "SGConv": Conv(_sg, plain, blocks=False),
    "SGConv weighted": Conv(_sg, weighted, blocks=False),
    "SGConv norm": Conv(lambda: _sg(nn.Tanh()), plain, blocks=False),
    "APPNPConv": Conv(lambda: dglnn.APPNPConv(3, 0.2), plain, blocks=False),
    "APPNPConv weighted": Conv(lambda: dglnn.APPNPConv(3, 0.2), weighted, blocks=False),
    "GINEConv": Conv(lambda: dglnn.GINEConv(nn.Linear(IN, OUT), 0.3, True), with_edges),
    "GatedGraphConv": Conv(lambda: dglnn.GatedGraphConv(IN, IN, 2, 1), plain, blocks=False),
    "GatedGraphConv typed": Conv(lambda: dglnn.GatedGraphConv(IN, IN, 2, 3), with_types, blocks=False),
    "GMMConv sum": Conv(lambda: dglnn.GMMConv(IN, OUT, 2, 3, "sum", True, allow_zero_in_degree=True), _pseudo),
    "GMMConv mean": Conv(lambda: dglnn.GMMConv(IN, OUT, 2, 3, "mean", allow_zero_in_degree=True), _pseudo),
    "GMMConv max": Conv(lambda: dglnn.GMMConv(IN, OUT, 2, 3, "max", allow_zero_in_degree=True), _pseudo),
    "ChebConv": Conv(lambda: dglnn.ChebConv(IN, OUT, 3), _lambda, blocks=False),
    "AGNNConv": Conv(lambda: dglnn.AGNNConv(allow_zero_in_degree=True), plain),
    "NNConv": Conv(lambda: dglnn.NNConv(IN, OUT, nn.Linear(6, IN * OUT), "mean", True), with_edges),
    "NNConv sum": Conv(lambda: dglnn.NNConv(IN, OUT, per_edge_matrix, "sum"), with_edges),
    "NNConv max": Conv(lambda: dglnn.NNConv(IN, OUT, nn.Linear(6, IN * OUT), "max"), with_edges),
    "AtomicConv": Conv(_atomic, _distances, blocks=False),
    "CFConv": Conv(lambda: dglnn.CFConv(IN, 6, 5, OUT), with_edges),
    "DotGatConv": Conv(lambda: dglnn.DotGatConv(IN, 2, 3, allow_zero_in_degree=True), plain),
    "TWIRLSConv": Conv(lambda: _twirls(), plain, blocks=False),
    "TWIRLSConv attention": Conv(lambda: _twirls(attention=True, attn_bef=True), plain, blocks=False),
    "PNAConv": Conv(_pna, plain, blocks=False),
    "PNAConv edges": Conv(lambda: _pna(num_towers=2, edge_feat_size=6, residual=False), with_edges, blocks=False),
    "DGNConv": Conv(_dgn, _eigenvectors, blocks=False),
    "HGTConv": Conv(lambda: dglnn.HGTConv(IN, 3, 2, 2, 3, dropout=0.0), _typed_nodes, blocks=False),
    "GroupRevRes": Conv(lambda: dglnn.GroupRevRes(dglnn.SAGEConv(3, 3, "mean"), 2), plain, blocks=False),
    "EGNNConv": Conv(lambda: dglnn.EGNNConv(IN, 5, OUT, 6), _two_outputs, blocks=False),
    "GCN2Conv": Conv(lambda: dglnn.GCN2Conv(IN, 1, allow_zero_in_degree=True), _residual, blocks=False),
    "GCN2Conv weighted": Conv(
        lambda: dglnn.GCN2Conv(IN, 1, project_initial_features=False, allow_zero_in_degree=True),
        lambda layer, graph, x, w, data: layer(graph, x, data.nodes["y"], edge_weight=w.squeeze(1)),
        blocks=False,
    ),
    "LabelPropagation": Conv(lambda: dglnn.LabelPropagation(3, 0.4), _labels, blocks=False),
}
CONVS = {name: conv for name, conv in CONVS.items() if hasattr(dglnn, name.split()[0])}


def conv_gradients(graph, data: Data, name: str) -> Results:
    """Outputs of a layer, and the gradients of features, edge features and parameters."""
    conv = CONVS[name]
    layer = conv.make().to(data.nodes["x"].dtype)
    x, w = data.leaf("x"), data.leaf("w")
    made = conv.call(layer, graph, x, w, data)
    outputs = made if isinstance(made, tuple) else (made,)
    rows = {"node": data.nodes["cotangent"], "edge": data.edges["edge cotangent"]}
    results: Results = {}
    loss = 0.0
    for number, output in enumerate(outputs):
        kind = "edge" if (name.startswith("EGAT") and number == 1) or ("attention" in name and number == 1) else "node"
        # A copy, because GroupRevRes frees what it returned during the backward.
        results[f"{kind} output {number}"] = output.detach().clone()
        if output.requires_grad:
            loss = loss + weighted_sum(output, rows[kind])
    if isinstance(loss, Tensor):
        loss.backward()
        results |= parameter_gradients(layer)
    for kind, leaf in (("node x", x), ("edge w", w)):
        if leaf.grad is not None:
            results[f"{kind}.grad"] = leaf.grad
    return results
