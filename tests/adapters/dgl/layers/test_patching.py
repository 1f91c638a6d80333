"""`patch_dgl`: what it replaces and puts back, and what attention layers say where they cannot use one pass."""

from operator import attrgetter

import dgl
import pytest
import torch
from packaging.version import Version
from torch import nn

import sar
from sar.adapters.dgl.layers.gat_layers import in_one_pass
from sar.adapters.dgl.layers.patched_layers import PATCHED_LAYERS

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


def test_patched_layers_on_a_dgl_graph_are_dgls_own():
    torch.manual_seed(0)
    graph, x = dgl.add_self_loop(dgl.rand_graph(10, 30)), torch.rand(10, 4)
    layer = dgl.nn.GATConv(4, 3, 2)
    expected = layer(graph, x)
    sar.patch_dgl()
    try:
        assert torch.equal(layer(graph, x), expected)
    finally:
        sar.unpatch_dgl()


class Falling(nn.Module):
    leaky_relu = nn.LeakyReLU(-0.5)


class Plain(nn.Module):
    leaky_relu = nn.LeakyReLU(0.2)


@pytest.mark.parametrize("layer, shape", [(Falling(), (3, 2)), (Plain(), (3, 2, 2))])
def test_attention_that_one_pass_does_not_serve_is_dgls_own_and_says_so_once(caplog, layer, shape):
    def one_pass(*args):
        raise AssertionError

    forward = in_one_pass(one_pass)
    with caplog.at_level("WARNING", logger="sar"):
        results = [forward(lambda *args, **kwargs: "original", layer, None, torch.ones(shape)) for _ in range(2)]
    assert results == ["original", "original"]
    assert [type(layer).__name__ in record.getMessage() for record in caplog.records] == [True]


def test_attention_weights_that_are_asked_for_come_from_dgls_own_forward(caplog):
    forward = in_one_pass(lambda *args: "one pass")
    with caplog.at_level("WARNING", logger="sar"):
        result = forward(lambda *args, **kwargs: kwargs, Plain(), None, torch.ones(3, 2), get_attention=True)
    assert result == {"get_attention": True}
    assert not caplog.records
