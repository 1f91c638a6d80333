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
    call: its arguments after the graph, by the names in `arguments`, `option=name` for one with a name; or
        (layer, graph, x (N, 6), w (E, 1), data) -> output, or several.
    outputs: for each output, whether its rows are nodes or edges.
    """

    make: Callable[[], nn.Module]
    call: str | Callable[..., Any] = "x"
    outputs: tuple[str, ...] = ("node",)

    def run(self, layer: nn.Module, graph: Any, x: Tensor, w: Tensor, data: Data) -> Any:
        if not isinstance(self.call, str):
            return self.call(layer, graph, x, w, data)
        given, options = arguments(graph, x, w, data), (word.rpartition("=") for word in self.call.split())
        args, named = [], {}
        for name, _, value in options:
            named |= {name: given[value]} if name else {}
            args += [] if name else [given[value]]
        made = layer(graph, *args, **named)
        return made["_N"] if isinstance(made, dict) else made


def arguments(graph: Any, x: Tensor, w: Tensor, data: Data) -> dict[str, Any]:
    """What layers are called with, by name; of an edge, its weight is a factor of all."""
    y, e = data.nodes["y"], data.edges["e"]
    return {
        "x": x,
        "pair": (x, x[: graph.num_dst_nodes()]),  # on DGL's blocks the destinations come first
        "first": x[:, :1],
        "by_type": {"_N": x},
        "y": y,
        "coordinates": y[:, :3],
        "vectors": y[:, :2],
        "scores": y[:, :3].abs(),
        "mask": y[:, 1] > 0,
        "kinds": (y[:, 0] > 0).long(),
        "one_kind": torch.zeros(len(y), dtype=torch.int64, device=y.device),
        "w": w,
        "weight": w.squeeze(1),
        "e": e * w,
        "pseudo": e[:, :2] * w,
        "types": edge_types(data),
        "matrix": torch.linspace(-1, 1, IN * OUT, dtype=x.dtype, device=x.device).view(IN, OUT),
        "lambda": torch.tensor([1.7], dtype=x.dtype, device=x.device),
        "on_workers": dist.is_initialized(),  # edges may be sorted by type on one machine only
        "true": True,
    }


def edge_types(data: Data) -> Tensor:
    """Three edge types, (E,) int64, of a fixed pattern."""
    return (data.edges["e"][:, 0] * 10).long().abs() % 3


def normalised_weight(norm, layer, graph, x, w, data):
    return layer(graph, x, edge_weight=dglnn.EdgeWeightNorm(norm)(graph, w.squeeze(1)))


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
NODE_AND_EDGE = ("node", "edge")


def layer_of(name: str) -> str:
    return name.split()[0]


# The name of the layer, and after a space the options.
REGISTRY = {
    **{
        f"GraphConv {norm}{option}": Conv(_graph(norm=norm), call)
        for norm in ("both", "left", "right", "none")
        for option, call in (("", "x"), (", edge_weight", "x edge_weight=weight"))
    },
    **{f"GraphConv {norm}, wide": Conv(_no_zero_check(dglnn.GraphConv, IN, 8, norm=norm)) for norm in ("both", "none")},
    "GraphConv weight given": Conv(_graph(weight=False), "x weight=matrix"),
    "GraphConv pair, activation": Conv(_graph(norm="right", activation=torch.tanh), "pair"),
    **{
        f"EdgeWeightNorm {norm}": Conv(_graph(norm="none"), partial(normalised_weight, norm))
        for norm in ("both", "right", "none")
    },
    "RelGraphConv": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3), "x types"),
    "RelGraphConv basis": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3, "basis", 2), "x types"),
    "RelGraphConv bdd": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3, "bdd", 2), "x types"),
    "RelGraphConv layer_norm, norm, no self_loop": Conv(
        lambda: dglnn.RelGraphConv(IN, OUT, 3, layer_norm=True, self_loop=False), "x types norm=w"
    ),
    "RelGraphConv presorted": Conv(lambda: dglnn.RelGraphConv(IN, OUT, 3), "x types presorted=on_workers"),
    "TAGConv": Conv(lambda: dglnn.TAGConv(IN, OUT)),
    "TAGConv edge_weight": Conv(lambda: dglnn.TAGConv(IN, OUT, 3, activation=torch.tanh), "x edge_weight=weight"),
    "GATConv": Conv(_gat(IN, 2, 3)),
    "GATConv one head": Conv(_gat(IN, 4, 1)),
    "GATConv residual": Conv(_gat(IN, 2, 3, residual=True)),
    "GATConv edge_weight": Conv(_gat(IN, 2, 3), "x edge_weight=weight"),
    "GATConv get_attention": Conv(_gat(IN, 2, 3, activation=torch.tanh), "x get_attention=true", NODE_AND_EDGE),
    "GATConv pair": Conv(_gat((IN, IN), 2, 3, residual=True, bias=False), "pair"),
    "GATv2Conv": Conv(_gatv2(IN, 2, 3)),
    "GATv2Conv residual, share_weights": Conv(_gatv2(IN, 2, 3, residual=True, share_weights=True)),
    "GATv2Conv get_attention": Conv(_gatv2(IN, 2, 3, activation=torch.tanh), "x get_attention=true", NODE_AND_EDGE),
    "GATv2Conv pair": Conv(_gatv2((IN, IN), 2, 3), "pair"),
    "EGATConv": Conv(lambda: dglnn.EGATConv(IN, 6, 2, 3, 2), "pair e", NODE_AND_EDGE),
    "EGATConv edge_weight": Conv(lambda: dglnn.EGATConv(IN, 6, 2, 3, 2), "pair e edge_weight=weight", NODE_AND_EDGE),
    "EGATConv get_attention": Conv(
        lambda: dglnn.EGATConv(IN, 6, 2, 3, 2),
        "pair e get_attention=true",
        (*NODE_AND_EDGE, "edge"),
    ),
    "EdgeGATConv": Conv(_edge_gat(), "x e"),
    "EdgeGATConv get_attention, no residual": Conv(
        _edge_gat(residual=False, activation=torch.tanh), "x e get_attention=true", NODE_AND_EDGE
    ),
    "EdgeGATConv pair": Conv(_no_zero_check(dglnn.EdgeGATConv, (IN, IN), 6, 2, 2), "pair e"),
    "EdgeConv": Conv(_no_zero_check(dglnn.EdgeConv, IN, OUT)),
    "EdgeConv batch_norm": Conv(_no_zero_check(dglnn.EdgeConv, IN, OUT, batch_norm=True)),
    **{
        f"SAGEConv {aggregator}{option}": Conv(partial(dglnn.SAGEConv, IN, OUT, aggregator), call)
        for aggregator in ("mean", "gcn", "pool", "lstm")
        for option, call in (("", "x"), (", edge_weight", "x edge_weight=weight"))
    },
    "SAGEConv mean, wide": Conv(partial(dglnn.SAGEConv, IN, 8, "mean")),
    "SAGEConv pair, norm, activation": Conv(
        lambda: dglnn.SAGEConv((IN, IN), OUT, "mean", norm=nn.LayerNorm(OUT), activation=torch.tanh), "pair"
    ),
    "SGConv": Conv(_sg()),
    "SGConv edge_weight": Conv(_sg(), "x edge_weight=weight"),
    "SGConv cached": Conv(_sg(cached=True), twice),
    "SGConv norm": Conv(_sg(norm=nn.Tanh())),
    "APPNPConv": Conv(lambda: dglnn.APPNPConv(3, 0.2)),
    "APPNPConv edge_weight": Conv(lambda: dglnn.APPNPConv(3, 0.2), "x edge_weight=weight"),
    **{
        f"GINConv {aggregator}": Conv(
            lambda aggregator=aggregator: dglnn.GINConv(nn.Linear(IN, OUT), aggregator, 0.3, True)
        )
        for aggregator in ("sum", "mean", "max")
    },
    "GINConv edge_weight, activation, no function": Conv(
        lambda: dglnn.GINConv(activation=torch.tanh), "x edge_weight=weight"
    ),
    "GINEConv": Conv(lambda: dglnn.GINEConv(nn.Linear(IN, OUT), 0.3, True), "x e"),
    "GatedGraphConv": Conv(lambda: dglnn.GatedGraphConv(IN, IN, 2, 1)),
    "GatedGraphConv etypes": Conv(lambda: dglnn.GatedGraphConv(IN, 8, 2, 3), "x types"),
    "GatedGCNConv": Conv(lambda: dglnn.GatedGCNConv(IN, 6, 6), "x e", NODE_AND_EDGE),
    "GatedGCNConv no batch_norm, no residual": Conv(
        lambda: dglnn.GatedGCNConv(IN, 6, OUT, batch_norm=False, residual=False), "x e", NODE_AND_EDGE
    ),
    "GMMConv sum, residual": Conv(_gmm("sum", True), "x pseudo"),
    "GMMConv mean": Conv(_gmm("mean"), "x pseudo"),
    "GMMConv max, residual": Conv(_gmm("max", True), "x pseudo"),
    "ChebConv lambda_max": Conv(lambda: dglnn.ChebConv(IN, OUT, 3), "x lambda"),
    "ChebConv": Conv(lambda: dglnn.ChebConv(IN, OUT, 3, activation=None)),
    "AGNNConv": Conv(_no_zero_check(dglnn.AGNNConv)),
    "AGNNConv no learn_beta": Conv(_no_zero_check(dglnn.AGNNConv, 0.7, False)),
    "AGNNConv pair": Conv(_no_zero_check(dglnn.AGNNConv), "pair"),
    "NNConv mean, residual": Conv(lambda: dglnn.NNConv(IN, OUT, nn.Linear(6, IN * OUT), "mean", True), "x e"),
    "NNConv sum": Conv(lambda: dglnn.NNConv(IN, OUT, per_edge_matrix, "sum"), "x e"),
    "NNConv max": Conv(lambda: dglnn.NNConv(IN, OUT, nn.Linear(6, IN * OUT), "max"), "x e"),
    "AtomicConv": Conv(_atomic, "first w"),
    "AtomicConv features_to_use": Conv(lambda: _atomic(features_to_use=torch.tensor([1.0, 2.0])), "first w"),
    "CFConv": Conv(lambda: dglnn.CFConv(IN, 6, 5, OUT), "x e"),
    "DotGatConv": Conv(_no_zero_check(dglnn.DotGatConv, IN, 2, 3)),
    "DotGatConv get_attention": Conv(_no_zero_check(dglnn.DotGatConv, IN, 2, 3), "x get_attention=true", NODE_AND_EDGE),
    "DotGatConv pair": Conv(_no_zero_check(dglnn.DotGatConv, (IN, IN), 2, 3), "pair"),
    "TWIRLSConv": Conv(_twirls()),
    "TWIRLSConv norm batch, no precond": Conv(_twirls(norm="batch", precond=False, num_mlp_before=2)),
    "TWIRLSConv norm layer, alp, lam": Conv(_twirls(norm="layer", alp=0.3, lam=0.7, num_mlp_after=2)),
    "TWIRLSConv attention, attn_bef": Conv(_twirls(attention=True, attn_bef=True)),
    "TWIRLSConv attention, use_eta, tau, T, p": Conv(_twirls(attention=True, use_eta=True, tau=0.3, T=4, p=0.5)),
    "TWIRLSConv cached": Conv(_twirls(num_mlp_before=0, hidden_d=IN), twice),
    "TWIRLSUnfoldingAndAttention": Conv(_unfolding),
    "PNAConv": Conv(_pna),
    "PNAConv std, moment3": Conv(lambda: _pna(aggregators=["std", "moment3"])),
    "PNAConv evaluation": Conv(lambda: _pna().eval()),
    "PNAConv edge_feat, towers, no residual": Conv(lambda: _pna(num_towers=2, edge_feat_size=6, residual=False), "x e"),
    "DGNConv": Conv(_dgn, "x eig_vec=vectors"),
    "DGNConv edge_feat, towers": Conv(lambda: _dgn(num_towers=2, edge_feat_size=6), "x e eig_vec=vectors"),
    "HGTConv": Conv(lambda: dglnn.HGTConv(IN, 3, 2, 2, 3, dropout=0.0), "x kinds types"),
    "HGTConv use_norm, other width": Conv(
        lambda: dglnn.HGTConv(IN, 2, 2, 2, 3, dropout=0.0, use_norm=True), "x kinds types"
    ),
    "HGTConv presorted": Conv(lambda: dglnn.HGTConv(IN, 3, 2, 2, 3, dropout=0.0), "x kinds types presorted=on_workers"),
    "GroupRevRes": Conv(lambda: dglnn.GroupRevRes(dglnn.SAGEConv(3, 3, "mean"), 2)),
    "GroupRevRes after update_all": Conv(lambda: dglnn.GroupRevRes(dglnn.SAGEConv(2, 2, "gcn"), 3), after_a_kernel),
    "EGNNConv": Conv(lambda: dglnn.EGNNConv(IN, 5, OUT), "x coordinates e", ("node", "node")),
    "EGNNConv edge_feat": Conv(lambda: dglnn.EGNNConv(IN, 5, OUT, 6), "x coordinates e", ("node", "node")),
    "GCN2Conv": Conv(_gcn2(), "x y"),
    "GCN2Conv edge_weight, own weights, activation": Conv(
        _gcn2(project_initial_features=False, activation=torch.tanh), "x y edge_weight=weight"
    ),
    **{
        f"HeteroGraphConv {how}": Conv(partial(_typed, how), "by_type")
        for how in ("sum", "mean", "max", "min", "stack")
    },
    "LabelPropagation classes": Conv(lambda: dglnn.LabelPropagation(3, 0.4), "kinds mask"),
    "LabelPropagation one class": Conv(lambda: dglnn.LabelPropagation(3, 0.4), "one_kind mask"),
    "LabelPropagation scores, row, no clamp": Conv(
        lambda: dglnn.LabelPropagation(3, 0.4, norm_type="row", clamp=False), "scores mask"
    ),
    "LabelPropagation classes, normalize, reset": Conv(
        lambda: dglnn.LabelPropagation(3, 0.4, normalize=True, reset=True), "kinds mask"
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
    made = conv.run(layer, part.graph, x[part.src], w[part.edges], part.take(data))
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
