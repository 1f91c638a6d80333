"""Answers of a graph belong to the caller: whatever is done to them, the graph computes and answers as before."""

import inspect
from copy import deepcopy

import dgl
import dgl.function as fn
import pytest
import torch

import sar
from sar.common_tuples import EID, NID
from tests.hetero_graphs import partition_hetero
from tests.parity.harness import build, random_shares

FRAMES = {"srcdata", "dstdata", "ndata", "edata", "edges", "sampling_graph"}  # hold fields, which are the graph's own
MAKES_GRAPHS = {
    "local_scope",
    "local_var",
    "get_full_partition_graph",
    "add_self_loop",
    "remove_self_loop",
    "call_context",
}


def answers(graph):
    """All that public attributes and methods without required arguments give, by name."""
    found = {}
    for name in dir(type(graph)):
        if name.startswith("_") or name in FRAMES | MAKES_GRAPHS or (graph.is_block and name == "nodes"):
            continue
        value = getattr(graph, name)
        if callable(value):
            needed = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty]
            if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in needed):
                continue
            value = value()
        found[name] = value
    if not graph.is_block:
        found |= {f"sampling graph {name}": column for name, column in graph.sampling_graph.ndata.items()}
    return found


def spoil(value):
    """Change everything in an answer that can be changed."""
    if isinstance(value, torch.Tensor):
        value.fill_(1) if value.dtype == torch.bool else value.mul_(3).add_(10**6)
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            spoil(each)
        value.clear()


def in_order(nodes):
    """A reduce function that tells the order of the messages, and spoils what it is given."""
    place = torch.arange(1.0, nodes.mailbox["m"].shape[1] + 1, dtype=torch.float64)
    spoil(nodes.nodes())
    return {"out": (nodes.mailbox["m"] / place[:, None]).sum(1)}


def computed(graph, x):
    """Results of built-in and Python functions, with gradients, and a mini-batch."""
    results = []
    for reduce in (fn.mean("m", "out"), in_order):
        with graph.local_scope():
            graph.srcdata["h"] = h = x[: graph.num_src_nodes()].clone().requires_grad_()
            graph.update_all(fn.copy_u("h", "m"), reduce)
            results.append(graph.dstdata["out"])
            results += torch.autograd.grad(results[-1].square().sum(), h)
    return results


def batches(graph, seeds):
    sampler = sar.DistNeighborSampler([2, 2], copy_edata=False)
    loader = sar.DataLoader(graph, seeds, sampler, batch_size=4, seed=7)
    seeds -= 1000
    found = []
    for blocks in loader:
        for block in blocks:
            before = block.srcdata[NID].clone()
            spoil(block.dstdata[NID])
            assert torch.equal(block.srcdata[NID], before)
            found += [before, *block.edges()]
            spoil(block.srcdata[NID])
    return found


FORMS = {
    "whole": lambda data, graph: graph,
    "one-shot": lambda data, graph: graph.get_full_partition_graph(),
    "flow graph": lambda data, graph: sar.construct_mfgs(data, graph.node_ids()[:3], 2)[0],
    "pairs": lambda data, graph: sar.pair_graph(graph, graph.node_ids(), graph.node_ids().flip(0)),
}


def use_and_spoil(mine, form):
    partition, data = mine
    x = data.nodes["x"]
    graph = FORMS[form](partition, build(partition, 1))
    before, known = [each.detach().clone() for each in computed(graph, x)], deepcopy(answers(graph))
    drawn = batches(graph, graph.node_ids()) if form == "whole" else []
    spoil(answers(graph))
    spoil(partition.node_features.get("orig_id"))
    again = batches(graph, graph.node_ids()) if form == "whole" else []
    for old, new in zip(before + drawn, computed(graph, x) + again, strict=True):
        torch.testing.assert_close(new.detach(), old, rtol=0, atol=0, equal_nan=True)
    assert str(answers(graph)) == str(known)
    return len(known)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_answers_are_the_callers(pool, world_size, form):
    counts = pool.run(use_and_spoil, form, per_rank=random_shares(world_size, torch.float64))
    assert min(counts) > 25


def change_edge_ids(mine):
    graph = build(mine[0], 1)
    graph.ndata["h"] = mine[1].nodes["x"]
    spoil(graph.edata["orig_id" if "orig_id" in graph.edata else EID])
    graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
    graph.update_all(fn.copy_u("h", "m"), in_order)


@pytest.mark.parametrize("world_size", [1])
def test_edge_ids_that_order_messages(pool, world_size):
    (outcome,) = pool.outcomes(change_edge_ids, per_rank=random_shares(world_size, torch.float64))
    assert outcome.kind == "GraphError"
    assert "Set a changed copy instead" in outcome.message


def spoil_types(partition):
    graph = sar.construct_full_graph(partition)
    for made in (graph, sar.construct_mfgs(partition, {"user": torch.arange(2)}, 1)[0]):
        known = {name: str(getattr(made, name)) for name in ("seeds", "input_nodes", "node_ranges", "etypes", "ntypes")}
        known |= {t: str((made.node_ids(t), made.original_ids(t))) for t in made.ntypes}
        for name in (*known, *made.ntypes):
            spoil(made.node_ids(name) if name in made.ntypes else getattr(made, name))
        for etype in made.canonical_etypes:
            spoil([made.in_degrees(etype=etype), made.out_degrees(etype=etype)])
            assert int(made.in_degrees(etype=etype).sum()) == made.num_edges(etype)
        assert known == {n: str(getattr(made, n)) for n in known if n not in made.ntypes} | {
            t: str((made.node_ids(t), made.original_ids(t))) for t in made.ntypes
        }


@pytest.mark.parametrize("world_size", [2])
def test_answers_by_type_are_the_callers(pool):
    edges = {("user", "follows", "user"): ([0, 1, 2, 3], [1, 2, 3, 3]), ("item", "of", "user"): ([0, 1, 1], [0, 3, 2])}
    graph = dgl.heterograph(edges, num_nodes_dict={"user": 4, "item": 3})
    assignment = {"user": torch.tensor([0, 1, 1, 0]), "item": torch.tensor([1, 0, 1])}
    pool.run(spoil_types, per_rank=partition_hetero(graph, assignment, 2).partitions)


def embedding_names(mine):
    graph = build(mine[0], 1)
    embedding = sar.nn.DistEmbedding(graph, 2)
    ids, known = embedding.node_ids, embedding.node_ids.clone()
    ids -= 1000
    return torch.equal(embedding.node_ids, known)


@pytest.mark.parametrize("world_size", [1])
def test_node_ids_of_an_embedding(pool, world_size):
    assert pool.run(embedding_names, per_rank=random_shares(world_size)) == [True]
