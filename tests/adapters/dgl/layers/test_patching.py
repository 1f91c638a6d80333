"""`patch_dgl`: when it is called, what it replaces and puts back, what graphs of DGL and unpatched layers see of it."""

import inspect
import sys
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from unittest import mock

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from dgl.nn.functional import edge_softmax as known_by_another_name
from packaging.version import Version
from torch import nn

import sar
from sar.adapters.dgl.patched_layers import PATCHED_LAYERS
from tests.core.attempts import catch_and_recover
from tests.parity.conv_layers import CONVS, NEEDS_PATCH, conv_gradients, layer_of, precision_of
from tests.parity.harness import check, deal, gradients, random_data
from tests.parity.scenarios import SCENARIOS
from tests.parity.test_conv_layers import with_in_edges

LAYERS = [patch for patch in PATCHED_LAYERS if Version(dgl.__version__) >= Version(patch.since)]


def methods():
    return [getattr(attrgetter(patch.layer)(dgl.nn.pytorch), patch.method) for patch in LAYERS]


def test_every_layer_of_the_table_is_replaced_and_put_back():
    sar.unpatch_dgl()  # a command that an earlier test ran in this process may have left DGL patched
    before = methods()
    sar.patch_dgl()
    try:
        patched = methods()
        sar.patch_dgl()  # changes nothing more
        assert methods() == patched
        assert not set(patched) & set(before)
    finally:
        sar.unpatch_dgl()
    assert methods() == before


def attention(graph, data):
    """DGL's GATConv, then a user's layer with the name `edge_softmax` as this file imported it."""
    if isinstance(graph, sar.GraphShardManager):
        sar.unpatch_dgl()
        made = sar.construct_full_graph(data.partition)
        graph = made.get_full_partition_graph() if isinstance(graph, sar.DistributedBlock) else made
    layer = dgl.nn.GATConv(6, 2, 3, allow_zero_in_degree=True).double()
    x = data.leaf("x")
    with graph.local_scope():
        graph.ndata["h"] = layer(graph=graph, feat=x).flatten(1)
        graph.apply_edges(fn.u_mul_v("h", "h", "score"))
        graph.edata["a"] = edge_softmax(graph, graph.edata["score"])
        graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "out"))
        out = graph.ndata["out"]
    return gradients(out, data, layer, x=x)


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_run_on_a_graph_that_was_made_while_dgl_was_imported(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(attention, ())])


def patches(data):
    """Whether DGL is patched after each of two graphs and of two message flow graphs."""
    sar.unpatch_dgl()
    here = []
    for make in (sar.construct_full_graph, lambda data: sar.construct_mfgs(data, torch.tensor([]).long(), 1)) * 2:
        make(data)
        here.append(hasattr(dgl.nn.GATConv.forward, "__wrapped__"))
    return here


@pytest.mark.parametrize("world_size", [2])
def test_making_a_graph_patches(pool):
    assert pool.run(patches, per_rank=SCENARIOS["random"](2).partitions) == [[True] * 4] * 2


def unpatched(mine, how):
    """What layers say after a graph was made with `Config.patch_dgl` False, or before DGL was imported."""
    partition, data = mine
    sar.unpatch_dgl()
    sar.Config.patch_dgl = how != "off"
    imported = {"dgl": sys.modules["dgl"]}
    if how == "imported later":
        del sys.modules["dgl"]
    graph = sar.construct_full_graph(partition)
    sar.construct_mfgs(partition, torch.tensor([]).long(), 1)
    sys.modules.update(imported)
    layers = {
        name: getattr(dgl.nn, name)(6, 2, 3, allow_zero_in_degree=True)
        for name in ("GATConv", "GATv2Conv", "DotGatConv")
    }
    said = {name: catch_and_recover(layer, graph, data.nodes["x"]) for name, layer in layers.items()}
    # The name that this module knows is the patched one where it was imported after a graph was made.
    return said, catch_and_recover(dgl.nn.functional.edge_softmax, graph, data.edges["w"])


@pytest.mark.processes("imports modules anew")
@pytest.mark.parametrize("how", ["off", "imported later"])
@pytest.mark.parametrize("world_size", [2])
def test_layers_of_unpatched_dgl_say_what_to_call(pool, how):
    parts = SCENARIOS["random"](2)
    for said, softmax in pool.run(unpatched, how, per_rank=deal(parts, random_data(parts))):
        for layer, failure in said.items():
            assert "GraphError" in failure.bases
            assert failure.message.startswith(
                f"{layer} of DGL reads graph._graph, which a distributed graph has not. Call sar.patch_dgl()"
            )
        assert "GraphError" in softmax.bases
        assert "call sar.edge_softmax, or sar.patch_dgl() before it" in softmax.message


PATCHED = {patch.layer.rpartition(".")[2] for patch in LAYERS}
OF_EACH_LAYER = {layer_of(name): name for name in CONVS}
PATCHED_CASES = [
    *(name for name in NEEDS_PATCH if name in CONVS),
    *(name for layer, name in OF_EACH_LAYER.items() if layer in PATCHED or layer in NEEDS_PATCH),
]


@pytest.mark.parametrize("name", PATCHED_CASES)
def test_patched_layers_on_a_dgl_graph_are_dgls_own(name):
    """Outputs and gradients, bit for bit."""
    sar.unpatch_dgl()
    parts = with_in_edges(1)
    graph, data = parts.reference(), random_data(parts, precision_of(name))
    results = []
    for patch in (sar.unpatch_dgl, sar.patch_dgl):
        patch()
        torch.manual_seed(7)
        results.append(conv_gradients(graph, data, name))
    sar.unpatch_dgl()
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][key], value) for key, value in results[1].items())


def test_every_patched_layer_is_compared():
    compared = {layer_of(name) for name in PATCHED_CASES}
    assert PATCHED - compared == {"PNAConvTower"}  # of PNAConv and DGNConv
    assert {"PNAConv", "DGNConv"} <= compared


def test_patched_functions_on_a_dgl_graph_are_dgls_own():
    graph = dgl.rand_graph(10, 30)
    graph.ndata["h"], logits = torch.rand(10, 2), torch.rand(7, 2)
    calls = [
        lambda: edge_softmax(graph, logits, eids=torch.arange(7), norm_by="src"),
        lambda: dgl.nn.functional.edge_softmax(graph, logits.repeat(5, 1)[:30]),
        lambda: dgl.sum_nodes(graph, "h"),
        lambda: dgl.readout_nodes(graph, "h"),
        lambda: dgl.nn.MaxPooling()(graph, graph.ndata["h"]),
        lambda: dgl.softmax_nodes(graph=graph, feat="h"),
        lambda: dgl.topk_nodes(graph, "h", 3, sortby=1)[0],
    ]
    before = [call() for call in calls]
    sar.patch_dgl()
    try:
        assert all(torch.equal(call(), value) for call, value in zip(calls, before, strict=True))
    finally:
        sar.unpatch_dgl()


@pytest.mark.parametrize("patch", LAYERS, ids=lambda patch: f"{patch.layer}.{patch.method}")
def test_patched_layers_take_their_graph_by_name(patch):
    """As DGL's do, whatever their parameter is called."""
    layer = attrgetter(patch.layer)(dgl.nn.pytorch)
    graph_name = list(inspect.signature(getattr(layer, patch.method)).parameters)[1]
    taken = []

    def own(self, *args, **kwargs):
        taken.append((args, kwargs))

    own.__signature__ = inspect.signature(getattr(layer, patch.method))
    with mock.patch.object(layer, patch.method, own):
        sar.patch_dgl()
        try:
            getattr(layer, patch.method)(None, **{graph_name: "a graph"}, other=1)
        finally:
            sar.unpatch_dgl()
    assert taken == [((), {graph_name: "a graph", "other": 1})]


KEPT = {
    "name": known_by_another_name,
    "attribute": SimpleNamespace(of=edge_softmax),
    "partial": partial(edge_softmax, norm_by="src"),
}


def softmax_by_other_names(graph, data):
    e = data.edges["e"]
    by_name, by_attribute = KEPT["name"](graph, e), KEPT["attribute"].of(graph=graph, logits=e)
    module = sys.modules["dgl.ops.edge_softmax"].edge_softmax(graph, e)
    return {"edge a": by_name, "edge b": by_attribute, "edge c": KEPT["partial"](graph, e), "edge d": module}


@pytest.mark.parametrize("world_size", [2])
def test_edge_softmax_by_any_name(pool, world_size):
    signature = inspect.signature(edge_softmax)
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(softmax_by_other_names, ())])
    for change in (sar.patch_dgl, sar.unpatch_dgl, sar.patch_dgl, sar.unpatch_dgl):
        change()
        assert inspect.signature(edge_softmax) == signature


def others(x):
    """Features of a node less than the worker has, and of one more."""
    return x[1:], torch.cat([x, x[:1]])


def explainer(kind=dgl.nn.GNNExplainer, **options):
    return kind(nn.Identity(), 2, **options)


REFUSED = {
    "GNNExplainer.explain_graph": lambda graph, x: explainer().explain_graph(graph, x),
    "GNNExplainer.explain_node": lambda graph, x: explainer().explain_node(feat=x, graph=graph, node_id=0),
    "SubgraphX.explain_graph": lambda graph, x: explainer(dgl.nn.SubgraphX).explain_graph(graph, x, 1),
    "dgl.sum_nodes": lambda graph, x: dgl.sum_nodes(graph, "x"),
    "AvgPooling": lambda graph, x: dgl.nn.AvgPooling()(graph, x),
    "dgl.softmax_nodes": lambda graph, x: dgl.softmax_nodes(graph=graph, feat="x"),
    "dgl.topk_nodes": lambda graph, x: dgl.topk_nodes(graph, "x", 2, sortby=0),
}
"""They would take a worker's nodes for all; by what their error names."""
OPTIONS = {"allow_zero_in_degree": True}
OF_ONE_ROW_EACH = {
    **{
        f"GraphConv {norm}": lambda norm=norm: dgl.nn.GraphConv(6, 6, norm=norm, **OPTIONS) for norm in ("none", "both")
    },
    "SAGEConv": lambda: dgl.nn.SAGEConv(6, 2, "mean"),
    "GINConv": lambda: dgl.nn.GINConv(nn.Linear(6, 2)),
    "GATConv": lambda: dgl.nn.GATConv(6, 2, 2, **OPTIONS),
}


def attempts(mine):
    partition, data = mine
    sar.patch_dgl()
    graph, x = sar.construct_full_graph(partition), data.nodes["x"]
    graph.ndata["x"] = x
    refused = {f"{name} takes no": catch_and_recover(call, graph, x) for name, call in REFUSED.items()}
    lengths = [catch_and_recover(make(), graph, rows) for make in OF_ONE_ROW_EACH.values() for rows in others(x)]
    return refused, lengths


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_would_be_wrong_across_workers_is_refused(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    for refused, lengths in pool.run(attempts, per_rank=deal(parts, random_data(parts))):
        for words, failure in refused.items():
            assert "GraphError" in failure.bases
            assert words in failure.message
        for failure in lengths:
            assert "GraphError" in failure.bases
            assert "set one row for each" in failure.message
