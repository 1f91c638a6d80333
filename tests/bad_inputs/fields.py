"""Features and message functions that do not fit the graph."""

import dgl.function as fn
import dgl.nn
import numpy as np
import torch

import sar
from tests.sampling.scenes import parts_of, typed_parts

N, E = 20, 60
COPY, SUM = fn.copy_u("x", "m"), fn.sum("m", "out")


def partition():
    return parts_of([N]).partitions[0]


def graph():
    return sar.construct_full_graph(partition())


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


def by(message):
    update(ones(), message=message)


def reduced(reducer):
    update(ones(), reducer=reducer)


def ones(*shape):
    return torch.ones(shape or (N, 2))


CASES = {
    "GraphError": {
        "copy(u['x']) is torch.int64": lambda: update(ones().long()),
        "copy(u['x']) is torch.bool": lambda: update(ones().bool()),
        "copy(u['x']) is torch.complex64": lambda: update(ones().to(torch.complex64)),
        "mul(u['x'], e['e']) have": lambda: update(ones(), ones(E, 2).double(), fn.u_mul_e("x", "e", "m")),
        "The operands of mul have trailing shapes": lambda: update(ones(), ones(E, 3), fn.u_mul_e("x", "e", "m")),
        "The operands of dot have trailing shapes": lambda: update(ones(), ones(E, 3), fn.u_dot_e("x", "e", "m")),
        "Field 'x' is of type ndarray": lambda: update(np.ones((N, 2))),
        "Field 'x' is of type list": lambda: update([1.0] * N),
        "Field 'x' has shape": lambda: update(ones(N - 1, 2)),
        "Field 'x' has shape ()": lambda: update(torch.tensor(1.0)),
        "Field 'x' is torch.sparse_coo": lambda: update(ones().to_sparse()),
        "Field 'x' is on meta, the graph on cpu": lambda: update(ones().to("meta")),
        "Field 'e' has shape": lambda: update(ones(), ones()),
        "The graph has several types": lambda: typed().ndata.__setitem__("x", ones()),
        "The message function makes 'm', but the": lambda: reduced(fn.sum("message", "out")),
        "'sum' is not a reducer": lambda: reduced("sum"),
        "None is not a reducer": lambda: reduced(None),
        "'copy_u' is not a message function": lambda: by("copy_u"),
        "None is not a message function": lambda: by(None),
        "'sum' is not a message function": lambda: update(ones(), message=SUM, reducer=COPY),
        "returned a Tensor": lambda: by(lambda edges: edges.src["x"]),
        "returned a NoneType": lambda: by(lambda edges: None),
        "returned 'm' with": lambda: by(lambda edges: {"m": edges.src["x"][:1]}),
        "makes ['z'], but": lambda: by(lambda edges: {"z": edges.src["x"]}),
        "returned a Tensor;": lambda: reduced(lambda nodes: nodes.mailbox["m"].sum(1)),
        "returned 'out'": lambda: reduced(lambda nodes: {"out": nodes.mailbox["m"].sum(1)[:0]}),
        "'x' is not a message function": lambda: graph().apply_edges("x"),
        "The logits have shape": lambda: sar.edge_softmax(graph(), ones(3, 1)),
        "The logits are torch.int64": lambda: sar.edge_softmax(graph(), ones(E, 1).long()),
        "edge_softmax got norm_by='both'": lambda: sar.edge_softmax(graph(), ones(E, 1), norm_by="both"),
        "eids are from 0 to 9999": lambda: sar.edge_softmax(graph(), ones(2, 1), eids=torch.tensor([0, 9999])),
        "Field 'h' has shape": lambda: dgl.nn.SAGEConv(3, 2, "mean")(graph(), ones(N - 1, 3)),
        "DistributedBN1D got": lambda: sar.DistributedBN1D(3)(ones(4, 2)),
        "DistributedBN1D got (4, 3) of torch.int64": lambda: sar.DistributedBN1D(3)(ones(4, 3).long()),
        "DistributedBN1D needs more than one row on": lambda: sar.DistributedBN1D(3)(ones(1, 3)),
    },
    "FieldError": {
        "There is no field 'x' on the nodes of type": lambda: update(),
        "There is no field 'y' on the nodes of type": lambda: graph().ndata.pop("y"),
        "no field 'y' on the nodes": lambda: by(lambda edges: {"m": edges.src["y"]}),
    },
}
