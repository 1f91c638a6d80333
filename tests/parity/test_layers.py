"""DGL's layers on the distributed graph: outputs and all gradients equal single-machine DGL."""

import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import sar
from tests.core.attempts import assert_disagreement, fail_on_all_ranks
from tests.matrix import corner
from tests.parity.conv_layers import conv_gradients
from tests.parity.harness import check, gradients, parameter_gradients, random_data
from tests.parity.scenarios import SCENARIOS


def patch():
    if dist.is_initialized():  # on a worker; the single-machine reference is DGL as it is
        sar.patch_dgl()


LAYERS = [
    *[f"GraphConv {norm}{option}" for norm in ("both", "left", "right", "none") for option in ("", ", edge_weight")],
    *[f"SAGEConv {how}" for how in ("mean", "mean, edge_weight", "gcn", "gcn, edge_weight", "pool")],
    *("GINConv sum", "GINConv mean", "GINConv max"),
    *("GATConv", "GATConv one head", "GATConv residual", "GATConv edge_weight"),
]
"""Of `conv_layers`; how they run on all kinds of graphs and partitions."""


TWO_WORKERS = ("isolated", "first worker without nodes")
"""What two workers run in `make test-fast`, which has no three."""
FOUR_WORKERS = ("random", "isolated", "ring of partitions", "first worker without nodes")
"""What four workers run; the rest is the same to them as to three, and four on two cores are slow."""


@pytest.mark.parametrize(
    "world_size, scenario, dtype",
    [
        *[(workers, scenario, torch.float64) for workers in (1, 3) for scenario in SCENARIOS],
        *[(2, scenario, torch.float64) for scenario in TWO_WORKERS],
        *[corner(2, scenario, torch.float64) for scenario in SCENARIOS if scenario not in TWO_WORKERS],
        *[corner(4, scenario, torch.float64) for scenario in FOUR_WORKERS],
        *[(workers, scenario, torch.float32) for workers in (1, 3) for scenario in ("isolated", "star")],
    ],
    ids=str,
)
def test_layers(pool, world_size, scenario, dtype):
    parts = SCENARIOS[scenario](world_size)
    # Without any edge DGL sends the gradient of a maximum to node 0; test_values tells what is right there.
    layers = [name for name in LAYERS if scenario != "no edges" or not name.endswith((" pool", " max"))]
    cases = [(conv_gradients, (name,)) for name in layers]
    check(pool, parts, random_data(parts, dtype), cases)


def gin_layers(graph, data, aggregator, eps, learn):
    """Two layers three times, and one to fewer features; the input of the first is constant, and is used once more."""
    patch()
    x = data.nodes["x"]
    width = x.shape[1]
    linear = [nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2, bias=not eps)]
    layers = [dgl.nn.GINConv(function, aggregator, eps, learn, torch.tanh).to(x) for function in linear]
    for _ in range(3):
        hidden = layers[0](graph, x)
        out = layers[1](graph, (hidden, hidden[: graph.num_dst_nodes()])) + hidden + x
    narrow = layers[2](graph, hidden)
    ((out**2).sum() + (narrow**3).sum()).backward()
    return {"node out": out, "node narrow": narrow, **parameter_gradients(nn.ModuleList(layers))}


@pytest.mark.parametrize("world_size", [1, 2])
def test_gin_adds_own_rows_in_place(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    cases = [
        (gin_layers, case)
        for case in (("sum", 0, False), ("max", 0.3, False), ("mean", -0.4, False), ("sum", 0.3, True))
    ]
    check(pool, parts, random_data(parts, torch.float64), cases)


def gin_of_unlike_ends(graph, data):
    """Sources of one width or precision, destinations of another: as DGL's sums, which broadcast and promote."""
    patch()
    x, layer = data.leaf("x"), dgl.nn.GINConv(None, "sum", 0.3).double()
    wide, exact = layer(graph, (x[:, :1], x)), layer(graph, (x.float(), x))
    return {"node wide": wide, **gradients(wide + exact, data, x=x)}


@pytest.mark.parametrize("world_size", [2])
def test_gin_of_unlike_ends(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(gin_of_unlike_ends, ())], tolerance=1e-6)


def gin_with_eps(graph, data, eps, hooked):
    """An epsilon that the layer was given afterwards, and a hook on all modules that doubles some results."""
    patch()
    x, layer = data.leaf("x"), dgl.nn.GINConv(None, "sum").double()
    del layer.eps
    layer.eps = eps
    hook = register_module_forward_hook(
        lambda module, _, out: 2 * out if hooked and type(module) is nn.Identity else None
    )
    try:
        out = layer(graph, x)
    finally:
        hook.remove()
    return gradients(out, data, x=x)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    ("eps", "hooked"), [(0.3, False), (torch.arange(6.0).double(), False), (torch.ones(1).double(), True)]
)
def test_gin_with_an_epsilon_of_any_kind_calls_no_module_of_its_own(pool, eps, hooked):
    parts = SCENARIOS["random"](2)
    check(pool, parts, random_data(parts, torch.float64), [(gin_with_eps, (eps, hooked))])


EQUAL_WIDTHS = {
    "SAGEConv": lambda width: dgl.nn.SAGEConv(width, width, "mean", activation=torch.tanh),
    "SAGEConv no bias": lambda width: dgl.nn.SAGEConv(width, width, "mean", bias=False),
    "GraphConv both": lambda width: dgl.nn.GraphConv(width, width, "both", allow_zero_in_degree=True),
    "GraphConv left": lambda width: dgl.nn.GraphConv(width, width, "left", allow_zero_in_degree=True),
    "GraphConv right": lambda width: dgl.nn.GraphConv(width, width, "right", bias=False, allow_zero_in_degree=True),
    "GraphConv none": lambda width: dgl.nn.GraphConv(width, width, "none", allow_zero_in_degree=True),
    "GINConv sum": lambda width: dgl.nn.GINConv(nn.Linear(width, width), "sum", 0.3),
    "GINConv mean": lambda width: dgl.nn.GINConv(nn.Linear(width, width, bias=False), "mean"),
}
"""Layers whose product comes before the sum if their input has a gradient, and behind it if it is constant."""


def equal_widths(graph, data, name, hooked):
    """Two layers on a constant and on a leaf; a hook keeps what the product's module gets and doubles its result."""
    patch()
    seen = []

    def hook(module, inputs, out):
        seen.append(inputs[0].detach().clone())
        return 2 * out

    x, constant = data.leaf("x"), data.nodes["x"] + 0.5
    layers = nn.ModuleList(EQUAL_WIDTHS[name](x.shape[1]).to(x) for _ in range(2))
    for layer in layers if hooked else ():
        product = layer.apply_func if name.startswith("GIN") else layer.fc_neigh
        product.register_forward_hook(hook)
    out = layers[1](graph, layers[0](graph, constant)) + layers[0](graph, x)
    return {f"node seen {i}": rows for i, rows in enumerate(seen)} | gradients(out, data, layers, x=x)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("scenario", ["random", "isolated"])
def test_a_product_to_as_many_features(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    plain = [(equal_widths, (name, False)) for name in EQUAL_WIDTHS]
    hooked = [(equal_widths, (name, True)) for name in EQUAL_WIDTHS if not name.startswith("GraphConv")]
    check(pool, parts, random_data(parts, torch.float64), [*plain, *hooked])


def hook_on_one_worker(graph, data):
    layer = dgl.nn.SAGEConv(6, 6, "mean").double()
    if sar.rank() == 1:
        layer.fc_neigh.register_forward_hook(lambda module, inputs, out: None)
    sar.patch_dgl()
    layer(graph, data.leaf("x"))


@pytest.mark.parametrize("world_size", [2])
def test_a_hook_on_one_worker_only(pool):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](2), hook_on_one_worker)
    assert_disagreement(failures, "worker 0: ", "as no module has hooks", "worker 1: ")
