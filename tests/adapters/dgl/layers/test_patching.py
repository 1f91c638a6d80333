"""`patch_dgl`: when it is called, what it replaces and puts back, what graphs of DGL and unpatched layers see of it."""

import inspect
import re
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
from sar.adapters.dgl.gat_layers import gat_conv
from sar.adapters.dgl.patched_layers import PATCHED_LAYERS
from tests.core.attempts import catch_and_recover
from tests.parity.conv_layers import CONVS, NEEDS_PATCH, conv_gradients, layer_of, precision_of
from tests.parity.harness import check, deal, parameter_gradients, random_data, weighted_sum
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
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node output": out, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_run_on_a_graph_that_was_made_while_dgl_was_imported(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(attention, ())])


def says_so(data):
    """What makes graphs patches, and what sar logs of it."""
    sar.unpatch_dgl()
    here, log = [], []
    with mock.patch.object(sar.logger, "info", lambda line, *args: log.append(line)):
        for make in (sar.construct_full_graph, lambda data: sar.construct_mfgs(data, torch.tensor([]).long(), 1)) * 2:
            make(data)
            here.append(hasattr(dgl.nn.GATConv.forward, "__wrapped__"))
    return here, [line for line in log if "DGL" in line]


@pytest.mark.parametrize("world_size", [2])
def test_patching_is_logged_once(pool):
    for patched, log in pool.run(says_so, per_rank=SCENARIOS["random"](2).partitions):
        assert patched == [True] * 4
        assert log == ["DGL's layers are patched for distributed graphs (sar.Config.patch_dgl)"]


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


def of_other_lengths(mine):
    """Features of a node less or more than the worker has."""
    partition, data = mine
    sar.patch_dgl()
    graph, x = sar.construct_full_graph(partition), data.nodes["x"].float()
    width, options = x.shape[1], {"allow_zero_in_degree": True}
    layers = [dgl.nn.GraphConv(width, width, norm=norm, **options) for norm in ("none", "right", "both")]
    layers += [dgl.nn.SAGEConv(width, 2, "mean"), dgl.nn.GINConv(nn.Linear(width, 2))]
    layers += [dgl.nn.GATConv(width, 2, 2, **options)]
    return [catch_and_recover(layer, graph, rows) for layer in layers for rows in (x[1:], torch.cat([x, x[:1]]))]


@pytest.mark.parametrize("world_size", [1, 2])
def test_features_of_another_length_are_refused(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    for failures in pool.run(of_other_lengths, per_rank=deal(parts, random_data(parts))):
        for failure in failures:
            assert "GraphError" in failure.bases
            assert "set one row for each" in failure.message


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


def explain(mine):
    partition, data = mine
    graph, x = sar.construct_full_graph(partition), data.nodes["x"]
    explainer = dgl.nn.GNNExplainer(nn.Identity(), 2, log=False)
    calls = [
        lambda: explainer.explain_graph(graph, x),
        lambda: explainer.explain_node(0, graph, x),
        lambda: explainer.explain_node(feat=x, graph=graph, node_id=0),
        lambda: dgl.nn.SubgraphX(nn.Identity(), 2).explain_graph(graph, x, 1),
    ]
    return [catch_and_recover(call) for call in calls]


@pytest.mark.parametrize("world_size", [2])
def test_explainers_are_refused_by_name(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    for failures in pool.run(explain, per_rank=deal(parts, random_data(parts))):
        for failure in failures:
            assert failure.kind == "GraphError"
            assert re.match(r"(GNNExplainer|SubgraphX)\.explain_\w+ takes no distributed graph", failure.message), (
                failure
            )


def readouts_of_own_nodes(mine):
    partition, data = mine
    graph = sar.construct_full_graph(partition)
    graph.ndata["x"] = data.nodes["x"]
    calls = [
        lambda: dgl.sum_nodes(graph, "x"),
        lambda: dgl.nn.AvgPooling()(graph, data.nodes["x"]),
        lambda: dgl.softmax_nodes(graph=graph, feat="x"),
        lambda: dgl.topk_nodes(graph, "x", 2, sortby=0),
    ]
    return [catch_and_recover(call) for call in calls]


@pytest.mark.parametrize("world_size", [1, 2])
def test_readouts_of_one_workers_nodes_are_refused(pool, world_size):
    """They would be one number too few on every worker: nobody has the others' rows."""
    parts = SCENARIOS["random"](world_size)
    for failures in pool.run(readouts_of_own_nodes, per_rank=deal(parts, random_data(parts))):
        for failure in failures:
            assert "GraphError" in failure.bases
            assert "sar.nn.global_mean(x)" in failure.message


class Plain(nn.Module):
    leaky_relu = nn.LeakyReLU(0.2)
    attn_drop = nn.Dropout(0.1)


class Falling(Plain):
    leaky_relu = nn.LeakyReLU(-0.5)


class OtherDropout(Plain):
    attn_drop = nn.AlphaDropout(0.1)


@pytest.mark.parametrize("kind", [Falling, OtherDropout, Plain])
def test_attention_that_one_pass_does_not_serve_is_dgls_own_and_says_so_once(caplog, kind):
    layer, shape = kind(), (3, 2, 2) if kind is Plain else (3, 2)
    with caplog.at_level("WARNING", logger="sar"):
        results = [gat_conv(lambda *args: "original", layer, None, torch.ones(shape)) for _ in range(2)]
    assert results == ["original", "original"]
    assert [type(layer).__name__ in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("args", "named"), [((), {"get_attention": True}), ((None, True), {})])
def test_attention_weights_that_are_asked_for_come_from_dgls_own_forward(caplog, args, named):
    with caplog.at_level("WARNING", logger="sar"):
        assert gat_conv(lambda *args: args[-1], Plain(), None, torch.ones(3, 2), *args, **named) is True
    assert not caplog.records
