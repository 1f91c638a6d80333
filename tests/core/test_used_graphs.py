"""Graphs made of graphs that have been used: nothing that the old one keeps may answer for the new one."""

import copy

import dgl.function as fn
import pytest
import torch

import sar
from tests.matrix import corner
from tests.parity.harness import build, check, random_data, random_shares
from tests.parity.programs import gated, largest, pairwise
from tests.parity.scenarios import SCENARIOS


def mean(graph, h):
    return aggregate(graph, h, fn.mean)


def total(graph, h):
    return aggregate(graph, h, fn.sum)


def aggregate(graph, h, reducer):
    with graph.local_scope():
        graph.srcdata["h"] = h
        graph.update_all(fn.copy_u("h", "m"), reducer("m", "out"))
        return graph.dstdata["out"]


def use(graph, data):
    """Results of several calls and their gradients, twice, so that everything that is ever kept is kept."""
    for _ in range(3):
        results = [mean(graph, data.nodes["x"]), total(graph, data.nodes["x"]), graph.in_degrees(), graph.out_degrees()]
        for layer in (mean, with_weights(largest), with_weights(pairwise), with_weights(gated)):
            x = data.leaf("x")
            out = layer(graph, x)
            (out * data.nodes["x"]).sum().backward()
            results += [out.detach(), x.grad]
        results.append(torch.tensor(graph.sampling_graph.num_edges()))
        scores = torch.ones(graph.num_edges(), 1, dtype=x.dtype)
        results.append(sar.edge_softmax(graph, scores))
    return results


def with_weights(layer):
    def call(graph, x):
        return layer(graph, x, torch.ones(graph.num_edges(), 1, dtype=x.dtype))

    return call


def moved(graph):
    """What `to` another device does, on the one device that there is."""
    structure = graph._structure.to(graph.device)
    return graph._with(structure=structure, relations=structure.relations)


CHANGES = {
    "add_self_loop": lambda graph: graph.add_self_loop(),
    "remove_self_loop": lambda graph: graph.remove_self_loop(),
    "both": lambda graph: graph.remove_self_loop().add_self_loop(),
    "to": moved,
    "get_full_partition_graph": lambda graph: graph.get_full_partition_graph(),
    "one edge type": lambda graph: graph[graph.canonical_etypes[0]],
    "local_var": lambda graph: graph.local_var(),
    "deepcopy": copy.deepcopy,
}


def change_a_used_graph(mine, change, mode):
    """What a graph made of a used one gives, what one made of a fresh one gives, and the used one before and after."""
    partition, data = mine
    fresh = use(CHANGES[change](build(partition, mode)), data)
    graph = build(partition, mode)
    before = use(graph, data)
    made = CHANGES[change](graph)
    return use(made, data), fresh, use(graph, data), before


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("world_size", [corner(1), 2])
def test_a_change_of_a_used_graph(pool, world_size, change):
    mine = random_shares(world_size, torch.float64)
    for mode in (1, 3):
        for found, fresh, after, before in pool.run(change_a_used_graph, change, mode, per_rank=mine):
            assert all(map(torch.equal, found, fresh)), mode
            assert all(map(torch.equal, after, before)), mode


def averaged_model():
    """A model that holds its graph, as DGL's older examples have it, and a copy of both."""
    graph = build(SCENARIOS["random"](sar.world_size()).partitions[sar.rank()], 1)
    graph.ndata["x"] = torch.ones(graph.num_nodes(), 2)
    model = torch.nn.Linear(2, 2)
    model.graph = graph
    copied = torch.optim.swa_utils.AveragedModel(model).module.graph
    graph.ndata["x"].zero_()
    return copied.ndata["x"].unique().tolist(), mean(copied, copied.ndata["x"]).amax().item()


@pytest.mark.parametrize("world_size", [2])
def test_a_copy_of_a_model_that_holds_its_graph(pool, world_size):
    assert pool.run(averaged_model) == [([1.0], 1.0)] * world_size


def messages_in_order(graph, data):
    """A reduce function in which the order of the messages matters, on graphs with other self-loops."""

    def reduce(nodes):
        place = torch.arange(1.0, nodes.mailbox["m"].shape[1] + 1, dtype=torch.float64)
        return {"out": (nodes.mailbox["m"] / place[:, None]).sum(1)}

    made = {}
    for name in ("remove_self_loop", "add_self_loop"):
        graph = getattr(graph, name)()
        graph.ndata["h"] = data.nodes["x"]
        graph.update_all(fn.copy_u("h", "m"), reduce)
        made[f"node {name}"] = graph.ndata["out"]
    return made


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_messages_come_in_the_order_of_the_input_graph(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(messages_in_order, ())], (1,))
