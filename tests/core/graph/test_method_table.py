"""The table of docs/graph_methods.md: each row against DGL, no public method of DGL's graphs missing, the errors."""

import re
from operator import attrgetter

import dgl
import pytest
import torch

import sar
from sar.adapters.dgl.advice import INSTEAD
from tests.core.attempts import catch
from tests.core.graph.method_table import PAGE, ROWS, SINCE_2_1, distributed_only, methods, table
from tests.parity.harness import check, random_data
from tests.parity.scenarios import SCENARIOS
from tests.sampling.scenes import parts_of

PUBLIC = {name for name in dir(dgl.DGLGraph) if not name.startswith("_")}


def as_tensor(value):
    """What comes back from workers; text and lists by their letters."""
    if isinstance(value, torch.Tensor | int) and not isinstance(value, bool):
        return torch.as_tensor(value).double()
    return torch.tensor(list(repr(value).encode())).double()


def values(graph, data):
    graph.ndata["x"], graph.edata["w"] = data.nodes["x"], data.edges["w"]
    return {f"{row.kind} {name}": as_tensor(row.value(graph)) for name, row in ROWS.items()}


@pytest.mark.parametrize("scenario", ["random", "isolated", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [2])
def test_each_row_is_as_dgl_has_it(pool, world_size, scenario):
    """On the whole graph: the same on each worker, rows of one worker after the other, or a sum."""
    parts = SCENARIOS[scenario](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(values, ())], modes=(1, 3))


def test_every_public_method_of_dgl_is_in_the_table():
    assert methods().keys() >= PUBLIC - SINCE_2_1
    assert methods().keys() - PUBLIC <= SINCE_2_1
    assert ROWS.keys() <= PUBLIC
    assert {name for name, (here, note) in methods().items() if here == "not here" and not note} == set()


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(), "see method_table.py for how to write it"


def test_the_page_tells_of_what_dgl_does_not_have():
    told = set(re.findall(r"`(\w+)`", PAGE.read_text().partition("## Additional attributes")[2]))
    assert set(distributed_only()) - told == set()


def what_absent_methods_say():
    graph = sar.construct_full_graph(parts_of([20]).partitions[0])
    absent = [name for name in methods() if name not in ROWS]
    return [(name, hasattr(graph, name), catch(getattr, graph, name)) for name in absent]


@pytest.mark.parametrize("world_size", [1])
def test_what_is_not_here_says_what_to_do(pool):
    [said] = pool.run(what_absent_methods_say)
    assert len(said) > 60
    for name, there, failure in said:
        assert not there
        assert failure.message == f"graph.{name} is not there on a distributed graph: {INSTEAD[name]}."


NODES = torch.ones(20, 2)
FUNCTIONS = {
    "dgl.add_reverse_edges": (),
    "dgl.copy_u": (NODES,),
    "dgl.in_subgraph": ([0],),
    "dgl.max_nodes": ("x",),
    "dgl.metis_partition_assignment": (2,),
    "dgl.ops.copy_u_mean": (NODES,),
    "dgl.ops.u_mul_e_max": (NODES, NODES),
    "dgl.sampling.sample_neighbors": ([0], 1),
    "dgl.softmax_nodes": ("x",),
    "dgl.to_simple": (),
}
TRANSFORMS = {"dgl.AddSelfLoop": (), "dgl.DropEdge": ()}


def what_functions_say():
    graph = sar.construct_full_graph(parts_of([20]).partitions[0])
    graph.ndata["x"] = torch.ones(20, 2)
    said = {name: catch(attrgetter(name[4:])(dgl), graph, *args) for name, args in FUNCTIONS.items()}
    said |= {name: catch(getattr(dgl, name[4:])(*args), graph) for name, args in TRANSFORMS.items()}
    said["dgl.nn.SumPooling"] = catch(dgl.nn.SumPooling(), graph, NODES)
    return said | {"dgl.batch": catch(dgl.batch, [graph])}


@pytest.mark.parametrize("world_size", [1])
def test_functions_of_dgl_say_what_to_do(pool):
    [said] = pool.run(what_functions_say)
    for name, failure in said.items():
        assert failure is not None, f"{name} did something"
        assert "GraphError" in failure.bases, (name, failure)
        called = name.removeprefix("dgl.nn.")  # layers are known without their package
        assert failure.message.startswith(f"{called} takes no distributed graph: "), (name, failure)
        function = "sum_nodes" if called == "SumPooling" else name.rpartition(".")[2]
        advice = INSTEAD.get(function, "it has no distributed form")
        assert advice in failure.message, (name, failure)
