"""What a batch of edges or nodes gives to a Python function, and what the function may do to it, as in DGL."""

import dgl.function as fn
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn import functional

from tests.parity.harness import build, check, deal, random_data, weighted_sum
from tests.parity.pyg_layers import edges_of
from tests.parity.scenarios import SCENARIOS

RELU = nn.ReLU(inplace=True)


def popped(edges):
    e = edges.data.pop("e")
    assert edges.data.pop("e", None) is None
    edges.data["twice"] = 2 * edges.src["x"]
    edges.dst.update(w=edges.data.pop("w"))
    assert {"w", "y"} <= {*edges.dst}
    return {"m": e * edges.dst["w"] + edges.data["twice"] * edges.dst["y"]}


def in_place(edges):
    x = edges.src["x"]
    x *= edges.data["w"]
    RELU(edges.dst["y"])
    edges.src["x"].add_(edges.dst["y"])
    return {"m": functional.elu(x, inplace=True) * edges.data["e"].clone().exp_()}


def edge_in_place(edges):
    return {"m": edges.data["e"].mul_(2).add_(edges.src["x"])}


def by_number(edges):
    _, _, rows = edges.edges()
    assert len(rows) == len(edges) == edges.batch_size()
    return {"m": edges.src["x"] * edges.weights[rows]}


def called(graph, data, function, how):
    """Outputs and gradients; the fields are as before."""
    x, y, e = (data.leaf(name) for name in ("x", "y", "e"))
    graph.srcdata["x"], graph.dstdata["y"] = x * 1, y * 1
    graph.edata["e"], graph.edata["w"] = e * 1, data.edges["w"].clone()
    fields = [graph.srcdata["x"], graph.dstdata["y"], graph.edata["w"]]
    before = [field.detach().clone() for field in fields]
    weights = data.edges["w"]

    def message(edges):
        edges.weights = weights
        return function(edges)

    if how == "edges":
        graph.apply_edges(message)
        out, kind, cotangent = graph.edata["m"], "edge", data.edges["edge cotangent"]
    else:
        mailbox = how == "mailbox"
        graph.update_all(message, reduced if mailbox else getattr(fn, how)("m", "out"))
        out, kind, cotangent = graph.dstdata["out"], "node", data.nodes["cotangent"]
    weighted_sum(out, cotangent).backward()
    assert all(map(torch.equal, fields, before))
    grads = {"node x.grad": x.grad, "node y.grad": y.grad, "edge e.grad": e.grad}
    return {f"{kind} out": out} | {name: grad for name, grad in grads.items() if grad is not None}


def reduced(nodes):
    m = nodes.mailbox.pop("m")
    m *= 2
    nodes.data["n"] = nodes.data.pop("y").sigmoid_()
    assert len(nodes) == len(nodes.nodes()) == nodes.batch_size()
    return {"out": m.sum(1) * nodes.data["n"] + nodes.nodes().unsqueeze(1).clamp(max=0)}


FUNCTIONS = [popped, in_place, edge_in_place, by_number]


@pytest.mark.parametrize("world_size", [1, 3])
def test_functions_may_change_their_batch(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    cases = [(called, (function, how)) for function in FUNCTIONS for how in ("sum", "max", "mailbox", "edges")]
    check(pool, parts, random_data(parts, torch.float64), cases, settings={"comm_buffer_bytes": 2000}, timeout=120)


class InPlace(pyg.MessagePassing):
    """A message that changes its operands in place; `how` names those."""

    def __init__(self, how, aggr="sum"):
        super().__init__(aggr)
        self.how = how

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j, x_i, e):
        for name in self.how.split():
            {"x_j": x_j, "x_i": x_i, "e": e}[name].mul_(2)
        x_j += e
        x_j += x_i
        return RELU(x_j)


def passed(graph, data, how, aggr):
    """Two layers, of which the second sees how the first has left values of edges, if gradients allow that."""
    x, e = data.leaf("x"), data.edges["e"].clone()
    conv, rows, edges = InPlace(how, aggr), x * 1, edges_of(graph)
    with torch.inference_mode():
        conv(rows.detach(), edges, e.clone())
    out = conv(conv(rows, edges, e.requires_grad_("e" not in how)) * 0.1, edges, e)
    before = rows.detach().clone()
    weighted_sum(out, data.nodes["cotangent"]).backward()
    assert torch.equal(rows, before)
    results = {"node out": out, "node x.grad": x.grad, "edge e": e.detach()}
    return results | ({"edge e.grad": e.grad} if e.requires_grad else {})


@pytest.mark.parametrize("world_size", [1, 2])
def test_messages_of_pyg_may_change_their_operands(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    cases = [(passed, (how, aggr)) for how in ("x_j", "x_i x_j", "e") for aggr in ("sum", "max")]
    check(pool, parts, random_data(parts, torch.float64), cases, settings={"comm_buffer_bytes": 2000}, timeout=120)


def numbered(mine):
    """Ends of edges, if a function reads features of sources, and if not; rows of edges and of nodes."""
    partition, _ = mine
    graph = build(partition, 1)
    graph.ndata["zero"] = torch.zeros(graph.num_nodes(), dtype=torch.int64)
    sampled = graph.sampling_graph
    ends = sampled.ndata["_ID"][torch.stack(sampled.edges(order="eid"))]
    graph.apply_edges(lambda edges: {"u": edges.edges()[0] + edges.src["zero"]})
    assert torch.equal(graph.edata["u"], ends[0])
    graph.apply_edges(lambda edges: dict(zip("uve", edges.edges(), strict=True)))
    assert torch.equal(torch.stack([graph.edata["u"], graph.edata["v"]]), ends)
    assert torch.equal(graph.edata["e"], torch.arange(graph.num_edges()))
    graph.apply_edges(lambda edges: {"some": edges.edges()[2] + 1}, edges=torch.arange(0, graph.num_edges(), 2))
    assert torch.equal(graph.edata["some"], (graph.edata["e"] + 1) * (graph.edata["e"] % 2 == 0))
    graph.update_all(fn.copy_e("e", "m"), lambda nodes: {"row": nodes.nodes()})
    assert torch.equal(graph.ndata["row"], torch.arange(graph.num_nodes()) * (graph.in_degrees() > 0))


@pytest.mark.parametrize("world_size", [2])
def test_numbers_of_edges_and_nodes(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    pool.run(numbered, per_rank=deal(parts, random_data(parts)))
