"""Graphs with more node types than their relations join, or fewer, equal single-machine DGL: types, fields, layers."""

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import pytest
import torch

import sar
from tests.core.attempts import catch
from tests.hetero_graphs import partition_hetero
from tests.matrix import corner
from tests.parity.harness import assert_close, parameter_gradients, weighted_sum

COUNTS, WIDTHS, OUT = {"user": 20, "item": 15, "tag": 6}, {"user": 4, "item": 3, "tag": 2}, 5
RATES, BUYS, RATED = ("user", "rates", "item"), ("user", "buys", "item"), ("item", "rated by", "user")
FOLLOWS, KNOWS, TAGS = ("user", "follows", "user"), ("user", "knows", "user"), ("tag", "of", "item")
GRAPHS = {
    "two types, one relation": ([RATES], ["user", "item"]),
    "a type without relations": ([RATES], ["user", "item", "tag"]),
    "one type of two": ([FOLLOWS], ["user", "item"]),
    "one type, two relations": ([FOLLOWS, KNOWS], ["user"]),
    "from some types to others": ([RATES, BUYS, TAGS], ["user", "item", "tag"]),
    "there and back": ([RATES, RATED, FOLLOWS], ["user", "item"]),
}


def whole_graph(name):
    relations, ntypes = GRAPHS[name]
    generator = torch.Generator().manual_seed(2)
    edges = {e: tuple(torch.randint(COUNTS[e[k]], (50,), generator=generator) for k in (0, 2)) for e in relations}
    graph = dgl.heterograph(edges, num_nodes_dict={ntype: COUNTS[ntype] for ntype in ntypes})
    for ntype in ntypes:
        for field, width in (("x", WIDTHS[ntype]), ("cotangent", OUT)):
            graph.nodes[ntype].data[field] = torch.randn(COUNTS[ntype], width, generator=generator).double()
    for etype in relations:
        graph.edges[etype].data["logits"] = torch.randn(50, 2, generator=generator).double()
    return graph


def types_of(graph):
    lists = graph.ntypes, graph.srctypes, graph.dsttypes, graph.etypes
    views = graph.nodes, graph.srcnodes, graph.dstnodes
    there = [[catch(view, ntype) is None for ntype in COUNTS] for view in views]
    return [*map(sorted, lists), graph.is_homogeneous, graph.is_block, there]


def run(graph, features, cotangents, logits):
    """Outputs and gradients of a layer over all relations, of each relation by itself, and of softmaxes."""
    torch.manual_seed(1)
    x = {ntype: rows.clone().requires_grad_() for ntype, rows in features.items()}
    logits = {etype: rows.clone().requires_grad_() for etype, rows in logits.items()}
    etypes = graph.canonical_etypes
    convs = {e[1]: dglnn.SAGEConv((WIDTHS[e[0]], WIDTHS[e[2]]), OUT, "mean").double() for e in sorted(etypes)}
    layer = dglnn.HeteroGraphConv(convs)
    outputs = {f"hetero {ntype}": rows for ntype, rows in layer(graph, x).items()}
    for etype in etypes:
        source, name, target = etype
        view, pair = graph[etype], (x[source], x[target][: graph.num_dst_nodes(target)])
        outputs[f"layer {target} {name}"] = convs[name](view, x[source] if source == target else pair)
        view.srcdata["h"] = x[source]
        view.edata["w"] = logits[etype][:, :1]
        view.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
        outputs[f"fields {target} {name}"] = view.dstdata["out"]
        graph.srcnodes[source].data["h"] = x[source]
    graph.multi_update_all({e: (fn.copy_u("h", "m"), fn.mean("m", f"o {e[1]}")) for e in etypes}, "sum")
    outputs |= {f"together {e[2]} {e[1]}": graph.dstnodes[e[2]].data[f"o {e[1]}"] for e in etypes}
    loss = sum(weighted_sum(rows, cotangents[key.split()[1]]) for key, rows in outputs.items())
    softmax = dgl.nn.functional.edge_softmax  # of one type DGL takes a tensor only
    for end in ("dst", "src"):
        scores = softmax(graph, logits if len(etypes) > 1 else logits[etypes[0]], norm_by=end)
        scores = scores if len(etypes) > 1 else {etypes[0]: scores}
        outputs |= {(end, etype): rows for etype, rows in scores.items()}
        loss = loss + sum((rows * logits[etype].detach().sin()).sum() for etype, rows in scores.items())
    loss.backward()
    grads = {("grad", kind): rows.grad for kind, rows in (x | logits).items() if rows.grad is not None}
    return {key: rows.detach() for key, rows in outputs.items()} | grads, parameter_gradients(layer)


def on_worker(data, mode):
    graph = sar.construct_full_graph(data)
    ntypes, etypes = graph.ntypes, graph.canonical_etypes
    logits = {etype: graph.edges[etype].data["logits"] for etype in etypes}
    types = [types_of(graph), *(types_of(graph[etype]) for etype in etypes)]
    sizes = [[g.num_nodes(), g.num_src_nodes(), g.num_dst_nodes()] for g in (graph, *(graph[e] for e in etypes))]
    if mode == "one shot":
        graph = graph.get_full_partition_graph()
    elif mode == "flow graph":  # into all nodes, so sources and destinations are they all
        graph = sar.construct_mfgs(data, {ntype: torch.arange(graph.num_nodes(ntype)) for ntype in ntypes}, 1)[0]
        assert sorted(graph.srctypes) == sorted(graph.dsttypes) == sorted(ntypes)
        sides = [(graph[e].num_nodes(), graph.num_src_nodes(e[0]) + graph.num_dst_nodes(e[2])) for e in etypes]
        assert all(found == expected for found, expected in sides)
    rows = [{ntype: data.node_features[f"{ntype}/{name}"] for ntype in ntypes} for name in ("x", "cotangent")]
    return types, sizes, *run(graph, *rows, logits)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("mode", ["tiles", "one shot", "flow graph"])
@pytest.mark.parametrize("world_size", [1, corner(2)])
def test_equal_dgl(pool, world_size, name, mode):
    whole = whole_graph(name)
    etypes = whole.canonical_etypes
    assignment = {t: torch.arange(COUNTS[t]) % world_size for t in whole.ntypes}
    parts = partition_hetero(whole, assignment, world_size)
    rows = [{ntype: whole.nodes[ntype].data[name] for ntype in whole.ntypes} for name in ("x", "cotangent")]
    expected, gradients = run(whole.local_var(), *rows, {e: whole.edges[e].data["logits"] for e in etypes})
    graphs = [whole, *(whole[etype] for etype in etypes)]
    made = pool.run(on_worker, mode, per_rank=parts.partitions)
    for types, _, _, parameters in made:
        assert types == [types_of(graph) for graph in graphs]
        for key, value in gradients.items():
            assert_close(parameters[key], value)
    total = torch.tensor([sizes for _, sizes, _, _ in made]).sum(0).tolist()
    assert total == [[g.num_nodes(), g.num_src_nodes(), g.num_dst_nodes()] for g in graphs]
    original = parts.node_ids | parts.edge_ids
    assert all(results.keys() == expected.keys() for _, _, results, _ in made)
    for key in expected:
        kind = key.split()[1] if isinstance(key, str) else key[1]
        assert_close(torch.cat([results[key] for _, _, results, _ in made]), expected[key][original[kind]])


def unfit_logits(data):
    graph = sar.construct_full_graph(data)
    logits = {etype: graph.edges[etype].data["logits"] for etype in graph.canonical_etypes}
    one = logits[RATES]
    calls = [[{RATES: one}], [one], [logits, [0]], [logits | {BUYS: one.float()}], [logits | {BUYS: one[1:]}]]
    [scores] = sar.edge_softmax(graph["rates"], {"rates": one}).values()  # one type in a dictionary is fine
    assert torch.equal(scores, sar.edge_softmax(graph["rates"], one))
    return [catch(sar.edge_softmax, graph, *given).kind for given in calls]


@pytest.mark.parametrize("world_size", [1])
def test_logits_of_several_types_are_checked(pool):
    parts = partition_hetero(
        whole_graph("from some types to others"), {t: torch.zeros(n) for t, n in COUNTS.items()}, 1
    )
    assert pool.run(unfit_logits, per_rank=parts.partitions) == [["GraphError"] * 5]
