"""Every convolution of `dgl.nn.pytorch.conv` with its options, called alike on DGL's graph and on sar's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dgl.function as fn
import dgl.nn.pytorch as dglnn
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sar
from tests.parity.blocks import block_of, whole
from tests.parity.harness import Data, Results, parameter_gradients, weighted_sum

IN, OUT = 6, 4


@dataclass(frozen=True)
class Conv:
    """A layer and how it is called.

    make: builds the layer.
    call: (layer, graph, x (N, 6), w (E, 1), data) -> output, or several.
    outputs: for each output, whether its rows are nodes or edges.
    """

    make: Callable[[], nn.Module]
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    outputs: tuple[str, ...] = ("node",)


def plain(layer, graph, x, w, data, **options):
    return layer(graph, x, **options)


def weighted(layer, graph, x, w, data):
    return layer(graph, x, edge_weight=w.squeeze(1))


def with_edges(layer, graph, x, w, data, **options):
    return layer(graph, x, data.edges["e"] * w, **options)


def pair(graph, x):
    """What DGL takes for sources and destinations; on its blocks the destinations come first."""
    return x, x[: graph.num_dst_nodes()]


def with_pair(layer, graph, x, w, data):
    return layer(graph, pair(graph, x))


def with_pair_and_edges(layer, graph, x, w, data, weight=False, **options):
    if weight:
        options["edge_weight"] = w.squeeze(1)
    return layer(graph, pair(graph, x), data.edges["e"] * w, **options)


def with_types(layer, graph, x, w, data, **options):
    return layer(graph, x, edge_types(data), **options)


def with_types_and_norm(layer, graph, x, w, data):
    return layer(graph, x, edge_types(data), norm=w)


def with_node_and_edge_types(layer, graph, x, w, data, **options):
    return layer(graph, x, node_types(data), edge_types(data), **options)


def said_to_be_sorted(call, layer, graph, x, w, data):
    """On one machine edges may be sorted by type; a distributed graph has another order."""
    return call(layer, graph, x, w, data, presorted=dist.is_initialized())


def normalised_weight(norm, layer, graph, x, w, data):
    return layer(graph, x, edge_weight=dglnn.EdgeWeightNorm(norm)(graph, w.squeeze(1)))


def with_weight(layer, graph, x, w, data):
    return layer(graph, x, weight=torch.linspace(-1, 1, IN * OUT, dtype=x.dtype, device=x.device).view(IN, OUT))


def with_pseudo_coordinates(layer, graph, x, w, data):
    return layer(graph, x, data.edges["e"][:, :2] * w)


def with_distances(layer, graph, x, w, data):
    return layer(graph, x[:, :1], w)


def with_coordinates(layer, graph, x, w, data):
    return layer(graph, x, data.nodes["y"][:, :3], data.edges["e"] * w)


def with_initial(layer, graph, x, w, data):
    return layer(graph, x, data.nodes["y"])


def with_initial_and_weight(layer, graph, x, w, data):
    return layer(graph, x, data.nodes["y"], edge_weight=w.squeeze(1))


def with_eigenvectors(layer, graph, x, w, data):
    return layer(graph, x, eig_vec=data.nodes["y"][:, :2])


def with_eigenvectors_and_edges(layer, graph, x, w, data):
    return layer(graph, x, data.edges["e"] * w, eig_vec=data.nodes["y"][:, :2])


def with_lambda_max(layer, graph, x, w, data):
    return layer(graph, x, torch.tensor([1.7], dtype=x.dtype, device=x.device))


def twice(layer, graph, x, w, data):
    """The second call takes what the first one has cached."""
    layer(graph, x)
    return layer(graph, 2 * x)


def after_a_kernel(layer, graph, x, w, data):
    """The layer's input is what message passing has made."""
    with graph.local_scope():
        graph.srcdata["x"] = x
        graph.update_all(fn.copy_u("x", "m"), fn.mean("m", "x"))
        return layer(graph, graph.dstdata["x"])


def of_classes(layer, graph, x, w, data):
    return layer(graph, node_types(data), data.nodes["y"][:, 1] > 0)


def of_one_class(layer, graph, x, w, data):
    return layer(graph, torch.zeros_like(node_types(data)), data.nodes["y"][:, 1] > 0)


def of_scores(layer, graph, x, w, data):
    return layer(graph, data.nodes["y"][:, :3].abs(), data.nodes["y"][:, 1] > 0)


def by_type(layer, graph, x, w, data):
    return layer(graph, {"_N": x})["_N"]


def edge_types(data: Data) -> Tensor:
    """Three edge types, (E,) int64, of a fixed pattern."""
    return (data.edges["e"][:, 0] * 10).long().abs() % 3


def node_types(data: Data) -> Tensor:
    """Two node types, (N,) int64."""
    return (data.nodes["y"][:, 0] > 0).long()


def per_edge_matrix(e: Tensor) -> Tensor:
    return e.repeat(1, OUT)


def _no_zero_check(make: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return partial(make, *args, allow_zero_in_degree=True, **options)


def _pna(**options: Any) -> nn.Module:
    aggregators = ["mean", "max", "min", "sum", "var"]
    return dglnn.PNAConv(
        IN, OUT, options.pop("aggregators", aggregators), ["identity", "amplification", "attenuation"], 2.5, **options
    )


def _dgn(**options: Any) -> nn.Module:
    aggregators = ["dir1-av", "dir1-dx", "sum"]
    return dglnn.DGNConv(IN, OUT, aggregators, ["identity", "amplification"], 2.5, **options)


def _atomic(**options: Any) -> nn.Module:
    cutoffs = torch.tensor([3.0, 4.0])
    return dglnn.AtomicConv(cutoffs, torch.tensor([0.0, 1.0]), torch.tensor([4.0, 4.0]), **options)


def _twirls(**options: Any) -> Callable[[], nn.Module]:
    return lambda: dglnn.TWIRLSConv(IN, OUT, **({"hidden_d": 8, "prop_step": 4} | options))


def _unfolding() -> nn.Module:
    return dglnn.TWIRLSUnfoldingAndAttention(IN, 0.0, 1.0, 3, attn_aft=1, use_eta=True)


def _typed(aggregate: str) -> nn.Module:
    return dglnn.HeteroGraphConv({"_E": dglnn.SAGEConv(IN, OUT, "mean")}, aggregate)


_graph = partial(_no_zero_check, dglnn.GraphConv, IN, OUT)
_gat = partial(_no_zero_check, dglnn.GATConv)
_gatv2 = partial(_no_zero_check, dglnn.GATv2Conv)
_edge_gat = partial(_no_zero_check, dglnn.EdgeGATConv, IN, 6, 2, 2)
_gmm = partial(_no_zero_check, dglnn.GMMConv, IN, OUT, 2, 3)
_sg = partial(_no_zero_check, dglnn.SGConv, IN, OUT, k=2)
_gcn2 = partial(_no_zero_check, dglnn.GCN2Conv, IN, 1)
with_attention = partial(plain, get_attention=True)
NODE_AND_EDGE = ("node", "edge")


def layer_of(name: str) -> str:
    return name.split()[0]


# The name of the layer, and after a space the options.
REGISTRY = {
    **{
        f"GraphConv {norm}{option}": Conv(_graph(norm=norm), call)
        for norm in ("both", "left", "right", "none")
        for option, call in (("", plain), (", edge_weight", weighted))
    },
    **{
        f"GraphConv {norm}, wide": Conv(_no_zero_check(dglnn.GraphConv, IN, 8, norm=norm), plain)
        for norm in ("both", "none")
    },
    "GraphConv weight given": Conv(_graph(weight=False), with_weight),
    "GraphConv pair, activation": Conv(_graph(norm="right", activation=torch.tanh), with_pair),
    **{
        f"EdgeWeightNorm {norm}": Conv(_graph(norm="none"), partial(normalised_weight, norm))
        for norm in ("both", "right", "none")
    },
    "RelGraphConv": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3), with_types),
    "RelGraphConv basis": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3, "basis", 2), with_types),
    "RelGraphConv bdd": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3, "bdd", 2), with_types),
    "RelGraphConv layer_norm, norm, no self_loop": Conv(
        lambda: dglnn.RelGraphConv(IN, OUT, 3, layer_norm=True, self_loop=False), with_types_and_norm
    ),
    "RelGraphConv presorted": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3), partial(said_to_be_sorted, with_types)),
    "TAGConv": Conv(lambda: dglnn.TAGConv(IN, OUT), plain),
    "TAGConv edge_weight": Conv(lambda: dglnn.TAGConv(IN, OUT, 3, activation=torch.tanh), weighted),
    "GATConv": Conv(_gat(IN, 2, 3), plain),
    "GATConv one head": Conv(_gat(IN, 4, 1), plain),
    "GATConv residual": Conv(_gat(IN, 2, 3, residual=True), plain),
    "GATConv edge_weight": Conv(_gat(IN, 2, 3), weighted),
    "GATConv get_attention": Conv(_gat(IN, 2, 3, activation=torch.tanh), with_attention, NODE_AND_EDGE),
    "GATConv pair": Conv(_gat((IN, IN), 2, 3, residual=True, bias=False), with_pair),
    "GATv2Conv": Conv(_gatv2(IN, 2, 3), plain),
    "GATv2Conv residual, share_weights": Conv(_gatv2(IN, 2, 3, residual=True, share_weights=True), plain),
    "GATv2Conv get_attention": Conv(_gatv2(IN, 2, 3, activation=torch.tanh), with_attention, NODE_AND_EDGE),
    "GATv2Conv pair": Conv(_gatv2((IN, IN), 2, 3), with_pair),
    "EGATConv": Conv(lambda: dglnn.EGATConv(IN, 6, 2, 3, 2), with_pair_and_edges, NODE_AND_EDGE),
    "EGATConv edge_weight": Conv(
        lambda: dglnn.EGATConv(IN, 6, 2, 3, 2), partial(with_pair_and_edges, weight=True), NODE_AND_EDGE
    ),
    "EGATConv get_attention": Conv(
        lambda: dglnn.EGATConv(IN, 6, 2, 3, 2),
        partial(with_pair_and_edges, get_attention=True),
        (*NODE_AND_EDGE, "edge"),
    ),
    "EdgeGATConv": Conv(_edge_gat(), with_edges),
    "EdgeGATConv get_attention, no residual": Conv(
        _edge_gat(residual=False, activation=torch.tanh), partial(with_edges, get_attention=True), NODE_AND_EDGE
    ),
    "EdgeGATConv pair": Conv(_no_zero_check(dglnn.EdgeGATConv, (IN, IN), 6, 2, 2), with_pair_and_edges),
    "EdgeConv": Conv(_no_zero_check(dglnn.EdgeConv, IN, OUT), plain),
    "EdgeConv batch_norm": Conv(_no_zero_check(dglnn.EdgeConv, IN, OUT, batch_norm=True), plain),
    **{
        f"SAGEConv {aggregator}{option}": Conv(partial(dglnn.SAGEConv, IN, OUT, aggregator), call)
        for aggregator in ("mean", "gcn", "pool", "lstm")
        for option, call in (("", plain), (", edge_weight", weighted))
    },
    "SAGEConv mean, wide": Conv(partial(dglnn.SAGEConv, IN, 8, "mean"), plain),
    "SAGEConv pair, norm, activation": Conv(
        lambda: dglnn.SAGEConv((IN, IN), OUT, "mean", norm=nn.LayerNorm(OUT), activation=torch.tanh), with_pair
    ),
    "SGConv": Conv(_sg(), plain),
    "SGConv edge_weight": Conv(_sg(), weighted),
    "SGConv cached": Conv(_sg(cached=True), twice),
    "SGConv norm": Conv(_sg(norm=nn.Tanh()), plain),
    "APPNPConv": Conv(lambda: dglnn.APPNPConv(3, 0.2), plain),
    "APPNPConv edge_weight": Conv(lambda: dglnn.APPNPConv(3, 0.2), weighted),
    **{
        f"GINConv {aggregator}": Conv(
            lambda aggregator=aggregator: dglnn.GINConv(nn.Linear(IN, OUT), aggregator, 0.3, True), plain
        )
        for aggregator in ("sum", "mean", "max")
    },
    "GINConv edge_weight, activation, no function": Conv(lambda: dglnn.GINConv(activation=torch.tanh), weighted),
    "GINEConv": Conv(lambda: dglnn.GINEConv(nn.Linear(IN, OUT), 0.3, True), with_edges),
    "GatedGraphConv": Conv(lambda: dglnn.GatedGraphConv(IN, IN, 2, 1), plain),
    "GatedGraphConv etypes": Conv(lambda: dglnn.GatedGraphConv(IN, 8, 2, 3), with_types),
    "GatedGCNConv": Conv(lambda: dglnn.GatedGCNConv(IN, 6, 6), with_edges, NODE_AND_EDGE),
    "GatedGCNConv no batch_norm, no residual": Conv(
        lambda: dglnn.GatedGCNConv(IN, 6, OUT, batch_norm=False, residual=False), with_edges, NODE_AND_EDGE
    ),
    "GMMConv sum, residual": Conv(_gmm("sum", True), with_pseudo_coordinates),
    "GMMConv mean": Conv(_gmm("mean"), with_pseudo_coordinates),
    "GMMConv max, residual": Conv(_gmm("max", True), with_pseudo_coordinates),
    "ChebConv lambda_max": Conv(lambda: dglnn.ChebConv(IN, OUT, 3), with_lambda_max),
    "ChebConv": Conv(lambda: dglnn.ChebConv(IN, OUT, 3, activation=None), plain),
    "AGNNConv": Conv(_no_zero_check(dglnn.AGNNConv), plain),
    "AGNNConv no learn_beta": Conv(_no_zero_check(dglnn.AGNNConv, 0.7, False), plain),
    "AGNNConv pair": Conv(_no_zero_check(dglnn.AGNNConv), with_pair),
    "NNConv mean, residual": Conv(lambda: dglnn.NNConv(IN, OUT, nn.Linear(6, IN * OUT), "mean", True), with_edges),
    "NNConv sum": Conv(lambda: dglnn.NNConv(IN, OUT, per_edge_matrix, "sum"), with_edges),
    "NNConv max": Conv(lambda: dglnn.NNConv(IN, OUT, nn.Linear(6, IN * OUT), "max"), with_edges),
    "AtomicConv": Conv(_atomic, with_distances),
    "AtomicConv features_to_use": Conv(lambda: _atomic(features_to_use=torch.tensor([1.0, 2.0])), with_distances),
    "CFConv": Conv(lambda: dglnn.CFConv(IN, 6, 5, OUT), with_edges),
    "DotGatConv": Conv(_no_zero_check(dglnn.DotGatConv, IN, 2, 3), plain),
    "DotGatConv get_attention": Conv(_no_zero_check(dglnn.DotGatConv, IN, 2, 3), with_attention, NODE_AND_EDGE),
    "DotGatConv pair": Conv(_no_zero_check(dglnn.DotGatConv, (IN, IN), 2, 3), with_pair),
    "TWIRLSConv": Conv(_twirls(), plain),
    "TWIRLSConv norm batch, no precond": Conv(_twirls(norm="batch", precond=False, num_mlp_before=2), plain),
    "TWIRLSConv norm layer, alp, lam": Conv(_twirls(norm="layer", alp=0.3, lam=0.7, num_mlp_after=2), plain),
    "TWIRLSConv attention, attn_bef": Conv(_twirls(attention=True, attn_bef=True), plain),
    "TWIRLSConv attention, use_eta, tau, T, p": Conv(_twirls(attention=True, use_eta=True, tau=0.3, T=4, p=0.5), plain),
    "TWIRLSConv cached": Conv(_twirls(num_mlp_before=0, hidden_d=IN), twice),
    "TWIRLSUnfoldingAndAttention": Conv(_unfolding, plain),
    "PNAConv": Conv(_pna, plain),
    "PNAConv std, moment3": Conv(lambda: _pna(aggregators=["std", "moment3"]), plain),
    "PNAConv evaluation": Conv(lambda: _pna().eval(), plain),
    "PNAConv edge_feat, towers, no residual": Conv(
        lambda: _pna(num_towers=2, edge_feat_size=6, residual=False), with_edges
    ),
    "DGNConv": Conv(_dgn, with_eigenvectors),
    "DGNConv edge_feat, towers": Conv(lambda: _dgn(num_towers=2, edge_feat_size=6), with_eigenvectors_and_edges),
    "HGTConv": Conv(lambda: dglnn.HGTConv(IN, 3, 2, 2, 3, dropout=0.0), with_node_and_edge_types),
    "HGTConv use_norm, other width": Conv(
        lambda: dglnn.HGTConv(IN, 2, 2, 2, 3, dropout=0.0, use_norm=True), with_node_and_edge_types
    ),
    "HGTConv presorted": Conv(
        lambda: dglnn.HGTConv(IN, 3, 2, 2, 3, dropout=0.0), partial(said_to_be_sorted, with_node_and_edge_types)
    ),
    "GroupRevRes": Conv(lambda: dglnn.GroupRevRes(dglnn.SAGEConv(3, 3, "mean"), 2), plain),
    "GroupRevRes after update_all": Conv(lambda: dglnn.GroupRevRes(dglnn.SAGEConv(2, 2, "gcn"), 3), after_a_kernel),
    "EGNNConv": Conv(lambda: dglnn.EGNNConv(IN, 5, OUT), with_coordinates, ("node", "node")),
    "EGNNConv edge_feat": Conv(lambda: dglnn.EGNNConv(IN, 5, OUT, 6), with_coordinates, ("node", "node")),
    "GCN2Conv": Conv(_gcn2(), with_initial),
    "GCN2Conv edge_weight, own weights, activation": Conv(
        _gcn2(project_initial_features=False, activation=torch.tanh), with_initial_and_weight
    ),
    **{f"HeteroGraphConv {how}": Conv(partial(_typed, how), by_type) for how in ("sum", "mean", "max", "min", "stack")},
    "LabelPropagation classes": Conv(lambda: dglnn.LabelPropagation(3, 0.4), of_classes),
    "LabelPropagation one class": Conv(lambda: dglnn.LabelPropagation(3, 0.4), of_one_class),
    "LabelPropagation scores, row, no clamp": Conv(
        lambda: dglnn.LabelPropagation(3, 0.4, norm_type="row", clamp=False), of_scores
    ),
    "LabelPropagation classes, normalize, reset": Conv(
        lambda: dglnn.LabelPropagation(3, 0.4, normalize=True, reset=True), of_classes
    ),
}
CONVS = {name: conv for name, conv in REGISTRY.items() if hasattr(dglnn, layer_of(name))}

TAKES_BLOCKS = (
    *("GraphConv", "EdgeWeightNorm", "RelGraphConv", "GATConv", "GATv2Conv", "EGATConv", "EdgeGATConv", "EdgeConv"),
    *("SAGEConv", "GINConv", "GINEConv", "GMMConv", "AGNNConv", "NNConv", "CFConv", "DotGatConv", "HGTConv"),
    "HeteroGraphConv",
)
NEEDS_PATCH = (
    *("GATConv", "GATv2Conv", "EGATConv", "EdgeGATConv", "AGNNConv", "DotGatConv", "HGTConv", "PNAConv", "DGNConv"),
    *("EdgeWeightNorm both", "RelGraphConv presorted", "EdgeConv batch_norm", "GatedGraphConv etypes", "GatedGCNConv"),
    *("TAGConv edge_weight", "SGConv edge_weight", "APPNPConv edge_weight", "TWIRLSConv norm batch, no precond"),
    *("GroupRevRes", "GCN2Conv edge_weight, own weights, activation"),
    *("LabelPropagation classes", "LabelPropagation classes, normalize, reset", "LabelPropagation one class"),
)
# DGL's own layer mixes float32 into other precisions.
SINGLE_PRECISION = ("APPNPConv", "TWIRLSConv", "TWIRLSUnfoldingAndAttention")
# It takes roots of moments. Of fewer different messages these are 0 but for rounding, of which the roots are not small.
NEEDS_THREE_SOURCES = ("PNAConv std, moment3",)


def among(names: Sequence[str], name: str) -> bool:
    """Whether a case, or its layer with any option, is one of `names`."""
    return name in names or layer_of(name) in names


def precision_of(name: str) -> torch.dtype:
    return torch.float32 if among(SINGLE_PRECISION, name) else torch.float64


def conv_gradients(graph, data: Data, name: str, seeds: Tensor | None = None) -> Results:
    """Outputs of a layer, and the gradients of features, edge features and parameters.

    With `seeds`, global node IDs by partition, the layer runs on their message flow graph. DGL is patched for layers of
    `NEEDS_PATCH` and on GPUs only, so that the others are shown to run without.
    """
    if dist.is_initialized():  # on a worker; the single-machine reference is DGL as it is
        (sar.patch_dgl if among(NEEDS_PATCH, name) or graph.device.type != "cpu" else sar.unpatch_dgl)()
    conv = CONVS[name]
    layer = conv.make().to(data.nodes["x"])
    part = whole(graph) if seeds is None else block_of(graph, data, seeds)
    x, w = data.leaf("x"), data.leaf("w")
    made = conv.call(layer, part.graph, x[part.src], w[part.edges], part.take(data))
    outputs = made if isinstance(made, tuple) else (made,)
    cotangents = {"node": data.nodes["cotangent"][part.dst], "edge": data.edges["edge cotangent"][part.edges]}
    results: Results = {}
    loss = 0.0
    for number, (kind, output) in enumerate(zip(conv.outputs, outputs, strict=True)):
        # A copy, because GroupRevRes frees what it returned during the backward.
        rows = output.detach().clone()
        if kind == "edge":
            rows = rows.new_zeros(graph.num_edges(), *rows.shape[1:]).index_copy(0, part.edges, rows)
        results[f"{kind} output {number}"] = rows
        if output.requires_grad:
            loss = loss + weighted_sum(output, cotangents[kind])
    if isinstance(loss, Tensor):
        loss.backward()
        results |= parameter_gradients(layer)
    for kind, leaf in (("node x", x), ("edge w", w)):
        if leaf.grad is not None:
            results[f"{kind}.grad"] = leaf.grad
    return results
