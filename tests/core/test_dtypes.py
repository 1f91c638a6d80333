"""Complex numbers and integers in Python message functions: as on one machine, or refused."""

import dgl
import dgl.function as fn
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import sar
from tests.core.attempts import fail_on_all_ranks
from tests.parity import pyg_layers
from tests.parity.harness import check, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS


class Rotation(nn.Module):
    """Messages as RotatE has them, made of complex features and of a complex parameter."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))

    def forward(self, edges):
        turned = edges.src["z"] * edges.data["r"].conj() * self.turn - edges.dst["z"]
        return {"m": turned, "d": turned.abs() + edges.src["x"]}


def reduced(graph, field, reducer):
    """A reducer, or on one machine, where DGL has none of complex numbers, a Python function for it."""
    if reducer == "python":
        return lambda nodes: {"out": nodes.mailbox[field].cumsum(1)[:, -1]}
    if isinstance(graph, dgl.DGLGraph) and field == "m":
        return lambda nodes: {"out": getattr(nodes.mailbox[field], reducer)(1)}
    return getattr(fn, reducer)(field, "out")


def real(x):
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def complex_messages(graph, data, field, reducer):
    torch.manual_seed(3)
    layer, x = Rotation(), data.leaf("x")
    z, r = (torch.complex(v, v.flip(1) + 1).requires_grad_() for v in (data.nodes["y"], data.edges["e"]))
    graph.ndata["z"], graph.ndata["x"], graph.edata["r"] = z, x, r
    if reducer is None:
        graph.apply_edges(layer)
        out, kind = graph.edata[field], "edge"
    else:
        graph.update_all(layer, reduced(graph, field, reducer))
        out, kind = graph.ndata["out"], "node"
    cotangent = data.nodes["cotangent"] if kind == "node" else data.edges["edge cotangent"]
    weighted_sum(real(out).flatten(1)[:, :8], cotangent).backward()
    (turn,) = parameter_gradients(layer).values()
    grads = {"node z": z, "edge r": r} if field == "m" else {"node z": z, "edge r": r, "node x": x}
    results = {f"{name}.grad": real(value.grad) for name, value in grads.items()}
    return {f"{kind} out": real(out), "same turn.grad": real(turn), **results}


def complex_rows(graph, data):
    """Rows of complex tensors, and sums of them by PyTorch Geometric."""
    z = torch.complex(data.nodes["x"], data.nodes["y"]).requires_grad_()
    rows = z if isinstance(graph, dgl.DGLGraph) else sar.fetch_rows(graph, z, graph.node_ids())
    out = pyg.SimpleConv("sum")(rows, pyg_layers.edges_of(graph)) * (2 - 1j)
    weighted_sum(real(out).flatten(1)[:, :8], data.nodes["cotangent"]).backward()
    return {"node out": real(out), "node z.grad": real(z.grad)}


@pytest.mark.parametrize("world_size, settings", [(1, {}), (2, {}), (3, {"comm_buffer_bytes": 2000})])
def test_complex_numbers(pool, world_size, settings):
    parts = SCENARIOS["random"](world_size)
    cases = [(complex_messages, (field, how)) for field in ("m", "d") for how in ("sum", "mean", None, "python")]
    check(pool, parts, random_data(parts, torch.float64), [*cases, (complex_rows, ())], settings=settings)


def of_dtype(graph, data, dtype, reducer):
    graph.ndata["k"] = (data.nodes["x"] * 50).to(dtype)
    graph.update_all(lambda edges: {"m": edges.src["k"]}, getattr(fn, reducer)("m", "out"))


def of_pyg(graph, data, dtype, reducer):
    pyg.SimpleConv(reducer)((data.nodes["x"] * 50).to(dtype), sar.pyg.edge_index(graph))


OTHERS = (torch.uint8, torch.int8, torch.int64, torch.bool)


@pytest.mark.parametrize(
    "program, dtype, reducer",
    [
        *((of_dtype, dtype, how) for dtype in OTHERS for how in ("sum", "mean", "max", "min")),
        *((of_pyg, dtype, how) for dtype in OTHERS for how in ("mean", "max", "min")),
        *((of_dtype, torch.complex64, how) for how in ("max", "min")),
        *((of_pyg, torch.complex64, how) for how in ("max", "mul")),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_what_built_in_reducers_refuse(pool, world_size, program, dtype, reducer):
    for failure in fail_on_all_ranks(pool, SCENARIOS["random"](world_size), program, dtype, reducer):
        assert failure.kind == "GraphError", failure
        assert f"is {dtype}; built-in arithmetic takes floating point" in failure.message, failure


def integer_results(graph, data):
    """Python reduce functions and PyTorch Geometric's sums of integers are torch's."""
    graph.ndata["k"] = (data.nodes["x"] * 50).to(torch.int8)
    graph.update_all(lambda edges: {"m": edges.src["k"]}, lambda nodes: {"out": nodes.mailbox["m"].sum(1)})
    graph.apply_edges(lambda edges: {"m": edges.src["k"].long() ** 3})
    conv = pyg.SimpleConv("sum")(graph.ndata["k"], pyg_layers.edges_of(graph))
    return {"node mailbox": graph.ndata["out"], "edge copied": graph.edata["m"], "node sums": conv}


@pytest.mark.parametrize("world_size", [2])
def test_integers_that_are_as_on_one_machine(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(integer_results, ())], tolerance=0)
