"""Features and message functions that do not fit the graph."""

from functools import partial

import dgl.function as fn
import dgl.nn
import numpy as np
import torch

import sar
from tests.bad_inputs import Case
from tests.sampling.scenes import parts_of, typed_parts

N, E = 20, 60
REAL_ONLY = "built-in arithmetic takes floating point. Call .float() or, on complex numbers, torch.view_as_real first."
COPY, SUM = fn.copy_u("x", "m"), fn.sum("m", "out")


def graph():
    return sar.construct_full_graph(parts_of([N]).partitions[0])


def typed():
    return sar.construct_full_graph(typed_parts(1).partitions[0])


def update(x=None, e=None, message=COPY, reducer=SUM):
    """`update_all` on a graph with these fields."""
    here = graph()
    if x is not None:
        here.ndata["x"] = x
    if e is not None:
        here.edata["e"] = e
    here.update_all(message, reducer)


def ones(*shape):
    return torch.ones(shape or (N, 2))


case = partial(Case, error="GraphError")

CASES = {
    "integers to be summed": case(lambda: update(ones().long()), "copy(u['x']) is torch.int64"),
    "truth values to be summed": case(lambda: update(ones().bool()), "copy(u['x']) is torch.bool"),
    "complex numbers": case(lambda: update(ones().to(torch.complex64)), "copy(u['x']) is torch.complex64"),
    "operands of different dtypes": case(
        lambda: update(ones(), ones(E, 2).double(), fn.u_mul_e("x", "e", "m")),
        "The operands of mul(u['x'], e['e']) have",
    ),
    "operands that do not broadcast": case(
        lambda: update(ones(), ones(E, 3), fn.u_mul_e("x", "e", "m")), "The operands of mul have trailing shapes"
    ),
    "a dot product of other widths": case(
        lambda: update(ones(), ones(E, 3), fn.u_dot_e("x", "e", "m")), "The operands of dot have trailing shapes"
    ),
    "an array of NumPy": case(lambda: update(np.ones((N, 2))), "Field 'x' is of type ndarray"),
    "a list": case(lambda: update([1.0] * N), "Field 'x' is of type list"),
    "features of another number of nodes": case(lambda: update(ones(N - 1, 2)), "Field 'x' has shape"),
    "features without rows": case(lambda: update(torch.tensor(1.0)), "Field 'x' has shape"),
    "a sparse tensor": case(lambda: update(ones().to_sparse()), "Field 'x' is torch.sparse_coo"),
    "features on another device": case(lambda: update(ones().to("meta")), "Field 'x' is on meta, the graph on cpu"),
    "nodes' features as edges'": case(lambda: update(ones(), ones()), "Field 'e' has shape"),
    "a field that nobody has set": case(
        lambda: update(), "There is no field 'x' on the nodes of type", error="FieldError"
    ),
    "a field that is not there to delete": case(
        lambda: graph().ndata.pop("y"), "There is no field 'y' on the nodes of type", error="FieldError"
    ),
    "one tensor for several types": case(lambda: typed().ndata.__setitem__("x", ones()), "The graph has several types"),
    "a reducer of another field": case(
        lambda: update(ones(), reducer=fn.sum("message", "out")), "The message function makes 'm', but the"
    ),
    "a reducer's name": case(lambda: update(ones(), reducer="sum"), "'sum' is not a reducer"),
    "no reducer": case(lambda: update(ones(), reducer=None), "None is not a reducer"),
    "a message function's name": case(lambda: update(ones(), message="copy_u"), "'copy_u' is not a message function"),
    "no message function": case(lambda: update(ones(), message=None), "None is not a message function"),
    "functions in the wrong order": case(
        lambda: update(ones(), message=SUM, reducer=COPY), "'sum' is not a message function"
    ),
    "a message function that returns a tensor": case(
        lambda: update(ones(), message=lambda edges: edges.src["x"]), "<lambda>.<locals>.<lambda> returned a Tensor"
    ),
    "a message function that returns nothing": case(
        lambda: update(ones(), message=lambda edges: None), "<lambda>.<locals>.<lambda> returned a"
    ),
    "a message function that drops edges": case(
        lambda: update(ones(), message=lambda edges: {"m": edges.src["x"][:1]}),
        "<lambda>.<locals>.<lambda> returned 'm' with",
    ),
    "a message function that makes another field": case(
        lambda: update(ones(), message=lambda edges: {"z": edges.src["x"]}),
        "<lambda>.<locals>.<lambda> makes ['z'], but",
    ),
    "a message function that reads what is not there": case(
        lambda: update(ones(), message=lambda edges: {"m": edges.src["y"]}),
        "There is no field 'y' on the nodes of type",
        error="FieldError",
    ),
    "a reduce function that returns a tensor": case(
        lambda: update(ones(), reducer=lambda nodes: nodes.mailbox["m"].sum(1)),
        "<lambda>.<locals>.<lambda> returned a Tensor",
    ),
    "a reduce function that drops nodes": case(
        lambda: update(ones(), reducer=lambda nodes: {"out": nodes.mailbox["m"].sum(1)[:0]}),
        "<lambda>.<locals>.<lambda> returned 'out'",
    ),
    "apply_edges with a field's name": case(lambda: graph().apply_edges("x"), "'x' is not a message function"),
    "logits of another number of edges": case(lambda: sar.edge_softmax(graph(), ones(3, 1)), "The logits have shape"),
    "logits that are integers": case(
        lambda: sar.edge_softmax(graph(), ones(E, 1).long()), "The logits are torch.int64"
    ),
    "softmax over something else": case(
        lambda: sar.edge_softmax(graph(), ones(E, 1), norm_by="both"), "edge_softmax got norm_by='both'"
    ),
    "softmax of edges that are not there": case(
        lambda: sar.edge_softmax(graph(), ones(2, 1), eids=torch.tensor([0, 9999])), "eids are from 0 to 9999"
    ),
    "a layer's input of another number of nodes": case(
        lambda: dgl.nn.SAGEConv(3, 2, "mean")(graph(), ones(N - 1, 3)), "Field 'h' has shape"
    ),
    "rows of another width to normalise": case(lambda: sar.DistributedBN1D(3)(ones(4, 2)), "DistributedBN1D got"),
    "integers to normalise": case(lambda: sar.DistributedBN1D(3)(ones(4, 3).long()), "DistributedBN1D got"),
    "a single row to normalise": case(
        lambda: sar.DistributedBN1D(3)(ones(1, 3)), "DistributedBN1D needs more than one row on"
    ),
}
