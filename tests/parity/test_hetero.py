"""Heterogeneous graphs read from a partition directory: layers over several relations equal single-machine DGL."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import pytest
import torch

import sar
from tests.hetero_graphs import COUNTS, OUT, RELATIONS, WIDTH, partition_hetero, whole_graph
from tests.matrix import corner
from tests.parity.harness import assert_close, assert_typed_close, typed_gradients


def hetero_conv(aggregate, graph, x):
    convs = {
        "writes": dglnn.SAGEConv(WIDTH, OUT, "mean"),
        "written by": dglnn.GraphConv(WIDTH, OUT, norm="right", allow_zero_in_degree=True),
        "cites": dglnn.SAGEConv(WIDTH, OUT, "pool"),
        "about": dglnn.GINConv(torch.nn.Linear(WIDTH, OUT), "max"),
    }
    layer = dglnn.HeteroGraphConv(convs, aggregate)
    return layer, layer(graph, x)


def attention(graph, x):
    layer = dglnn.GATConv((WIDTH, WIDTH), OUT, 2, residual=True, allow_zero_in_degree=True)
    return layer, {"paper": layer(graph["writes"], (x["author"], x["paper"])).flatten(1)}


def multi_update(cross_reducer, graph, x):
    with graph.local_scope():
        for ntype, h in x.items():
            graph.nodes[ntype].data["h"] = h
        functions = {
            "writes": (fn.copy_u("h", "m"), fn.sum("m", "out")),
            "written by": (lambda edges: {"m": edges.src["h"] * edges.dst["h"]}, fn.sum("m", "out")),
            "cites": (fn.u_mul_e("h", "w", "m"), fn.mean("m", "out")),
            "about": (fn.copy_u("h", "m"), lambda nodes: {"out": nodes.mailbox["m"].cumsum(1)[:, -1]}),
        }
        graph.multi_update_all(functions, cross_reducer)
        # DGL does not call a Python reduce function, nor set its field, where there is no edge.
        frames = {ntype: graph.nodes[ntype].data for ntype in COUNTS}
        return torch.nn.Module(), {ntype: frame["out"].flatten(1) for ntype, frame in frames.items() if "out" in frame}


def relation_views(graph, x):
    """Each relation by itself, through `graph[etype]`."""
    made = {}
    for etype in RELATIONS:
        view = graph[etype]
        view.srcdata["h"] = x[etype[0]]
        view.apply_edges(fn.copy_u("h", "s"))
        view.edata["s"] = view.edata["s"] * view.edata["w"]
        view.update_all(fn.copy_e("s", "m"), fn.sum("m", "out"))
        degrees = torch.stack([view.in_degrees(), torch.full_like(view.in_degrees(), view.num_src_nodes() > 0)], 1)
        made[etype[2]] = made.get(etype[2], 0) + view.dstdata["out"] * degrees[:, :1]
    return torch.nn.Module(), made


PROGRAMS = {
    "attention": attention,
    "relation_views": relation_views,
    **{
        f"{program.__name__} {how}": partial(program, how)
        for program in (hetero_conv, multi_update)
        for how in ("sum", "mean", "max", "min", "stack")
    },
}


def run(graph, features, cotangents, name):
    torch.manual_seed(3)
    x = {ntype: h.clone().requires_grad_() for ntype, h in features.items()}
    layer, outputs = PROGRAMS[name](graph, x)
    return typed_gradients(outputs, cotangents, x, layer)


def run_on_worker(path, mode, names):
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    assert {t: graph.num_nodes_global(t) for t in graph.ntypes} == COUNTS
    assert {etype: graph.num_edges_global(etype) for etype in graph.canonical_etypes} == RELATIONS
    return run_on_partition(data, mode, names)


def run_on_partition(data, mode, names):
    sar.patch_dgl()
    sar.Config.disable_sr = mode == 2
    graph = sar.construct_full_graph(data)
    assert graph.ntypes == data.node_type_names
    assert sorted(graph.canonical_etypes) == sorted(RELATIONS)
    if mode == 3:
        graph = graph.get_full_partition_graph()
    rows = {key: {t: data.node_features[f"{t}/{key}"] for t in COUNTS} for key in ("x", "cotangent")}
    return [run(graph.local_var(), rows["x"], rows["cotangent"], name) for name in names]


@pytest.fixture(scope="module", params=["metis", "random"])
def directory(request, tmp_path_factory):
    def make(world_size: int) -> tuple[Path, dict[str, torch.Tensor]]:
        out = tmp_path_factory.mktemp("hetero")
        for seed in range(20):  # DGL gives up on a part without a node or an edge of some type
            dgl.seed(seed)
            with suppress(IndexError):
                node_map, _ = dgl.distributed.partition_graph(
                    whole_graph(), "hetero", world_size, str(out), part_method=request.param, return_mapping=True
                )
                return out / "hetero.json", node_map
        raise AssertionError("DGL finds no division")

    return make


@pytest.mark.parametrize("num_parts, world_size", [corner(2, 2), (3, 3), (5, 2), corner(5, 1), corner(1, 3)])
def test_relations_together(pool, num_parts, directory):
    path, node_map = directory(num_parts)
    names = list(PROGRAMS)
    by_mode = {mode: pool.run(run_on_worker, str(path), mode, names, timeout=120) for mode in (1, 2, 3)}
    compare(by_mode, whole_graph(), node_map, names)


def some_on_the_last_worker(workers, ntypes):
    """A partition for every node, the last for all of `ntypes`."""
    generator = torch.Generator().manual_seed(8)
    assignment = {t: torch.randint(workers, (count,), generator=generator) for t, count in COUNTS.items()}
    return assignment | {t: torch.full((COUNTS[t],), workers - 1) for t in ntypes}


# Not without "cites": where there is no edge at all, the gradient of DGL's maximum goes to node 0.
@pytest.mark.parametrize("world_size", [corner(2), 3])
@pytest.mark.parametrize(
    "away, without",
    [
        (["author"], []),
        (["topic", "paper"], []),
        (COUNTS, []),
        ([], ["topic"]),
        ([], ["writes", "written by"]),
        (["paper"], ["author"]),
    ],
    ids=["no authors on a worker", "authors alone", "empty worker", "no topics", "no authorship", "no authors at all"],
)
def test_types_that_are_missing(pool, world_size, away, without):
    graph = whole_graph(without)
    assignment = {t: parts[: graph.num_nodes(t)] for t, parts in some_on_the_last_worker(world_size, away).items()}
    parts = partition_hetero(graph, assignment, world_size)
    names = list(PROGRAMS)
    by_mode = {
        mode: pool.run(run_on_partition, mode, names, per_rank=parts.partitions, timeout=120) for mode in (1, 2, 3)
    }
    compare(by_mode, graph, parts.node_ids, names)


REDUCERS = {
    **{how: (fn.copy_u("h", "m"), getattr(fn, how)("m", "out")) for how in ("sum", "max", "min")},
    "python": (fn.copy_u("h", "m"), lambda nodes: {"out": nodes.mailbox["m"].max(1).values}),
    "python message": (lambda edges: {"m": edges.src["h"]}, fn.max("m", "out")),
    # Which sees the infinite maxima and minima of nodes without messages, and leaves out the field that they are in.
    "apply": (fn.copy_u("h", "m"), fn.min("m", "low"), lambda nodes: {"out": nodes.data["low"].clamp(max=7)}),
}
ACROSS = {"function": lambda columns: columns[0].clamp(-8, 8) - 2 * columns[-1].clamp(-9, 9)}


def partly_reached():
    """Items that both relations reach, one, or none, with equal and infinite messages; a relation without edges."""
    items = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5]), torch.tensor([0, 1, 3, 4, 4, 5, 6, 7])
    edges = {
        ("user", "rates", "item"): (torch.tensor([0, 1, 2, 3, 4, 0, 5, 1]), items[0]),
        ("tag", "on", "item"): (torch.tensor([0, 1, 2, 3, 0, 4, 5, 1]), items[1]),
        ("none", "off", "item"): (torch.tensor([], dtype=torch.int64),) * 2,
    }
    graph = dgl.heterograph(edges, num_nodes_dict={"user": 6, "tag": 6, "none": 2, "item": 9})
    users, tags = [-1.0, -2, -2, -torch.inf, 3, torch.inf], [-2.0, -1, -3, 4, -torch.inf, torch.nan]
    for ntype, h in {"user": users, "tag": tags}.items():
        graph.nodes[ntype].data["h"] = torch.tensor(h, dtype=torch.float64).unsqueeze(1).repeat(1, 2) - torch.arange(2)
    for ntype, count in {"none": 2, "item": 9}.items():
        graph.nodes[ntype].data["h"] = torch.arange(1.0, 2 * count + 1, dtype=torch.float64).view(count, 2)
    return graph


def combine(graph, h, cotangents, pairs):
    """Outputs of `multi_update_all`, and gradients of what is finite, for reducers of each relation and across."""
    results = []
    for names, across, final in pairs:
        x = {ntype: h[ntype].clone().requires_grad_() for ntype in ("user", "tag")}
        with graph.local_scope():
            for ntype, rows in (h | x).items():
                graph.nodes[ntype].data["h"] = rows
            functions = {etype: REDUCERS[name] for etype, name in names.items()}
            apply = (lambda nodes: {"twice": nodes.data["out"] * 2 + nodes.data["h"]}) if final else None
            graph.multi_update_all(functions, ACROSS.get(across, across), apply)
            fields = graph.nodes["item"].data
            assert ("twice" in fields, "low" in fields) == (final, False)
            out = fields["twice" if final else "out"].flatten(1)
        if out.requires_grad:
            (out * cotangents.repeat(1, out.shape[1] // 2)).masked_fill(~out.isfinite(), 0).sum().backward()
        grads = (torch.zeros_like(rows) if rows.grad is None else rows.grad for rows in x.values())
        results.append([out.detach(), *grads])
    return results


PAIRS = [
    ({one: first, other: second}, across, final)
    for one, other in (("rates", "on"), ("on", "rates"), ("off", "on"))
    for first in REDUCERS
    for second in (REDUCERS if one != "off" else ["max"])
    for across in (["sum", "mean", "max", "min", "stack", "function"] if one != "on" else ["max", "stack", "function"])
    for final in ((False, True) if across == "max" else (False,))
]


def combine_on_worker(data):
    graph = sar.construct_full_graph(data)
    rows = {t: data.node_features[f"{t}/h"] for t in graph.ntypes}
    return combine(graph, rows, rows["item"], PAIRS)


@pytest.mark.parametrize("world_size", [1, 3])
def test_nodes_that_some_relations_reach(pool, world_size):
    graph = partly_reached()
    generator = torch.Generator().manual_seed(world_size)
    assignment = {t: torch.randint(world_size, (graph.num_nodes(t),), generator=generator) for t in graph.ntypes}
    parts = partition_hetero(graph, assignment, world_size)
    expected = combine(graph, {t: graph.nodes[t].data["h"] for t in graph.ntypes}, graph.nodes["item"].data["h"], PAIRS)
    by_rank = pool.run(combine_on_worker, per_rank=parts.partitions, timeout=120)
    for number, pair in enumerate(PAIRS):
        for place, ntype in enumerate(("item", "user", "tag")):
            found = torch.cat([results[number][place] for results in by_rank])
            try:
                assert_close(found, expected[number][place][parts.node_ids[ntype]])
            except AssertionError as error:
                raise AssertionError(f"{pair}, {ntype}: {error}") from None


def compare(by_mode, graph, node_map, names):
    """What the workers made in each mode with the programs on the whole graph; `node_map` as DGL returns it."""
    features = {t: graph.nodes[t].data["x"] for t in COUNTS}
    cotangents = {t: graph.nodes[t].data["cotangent"] for t in COUNTS}
    expected = [run(graph.local_var(), features, cotangents, name) for name in names]
    for by_rank in by_mode.values():
        for number, results in enumerate(expected):
            assert_typed_close([found[number] for found in by_rank], results, node_map)


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        widths = ((WIDTH, OUT), (OUT, OUT))
        self.layers = torch.nn.ModuleList(
            dglnn.HeteroGraphConv({etype[1]: dglnn.SAGEConv(i, o, "mean") for etype in RELATIONS}) for i, o in widths
        )

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            x = {ntype: h.tanh() for ntype, h in layer(block, x).items()}
        return x


def train_on_blocks(blocks, features, cotangents):
    torch.manual_seed(4)
    x = {ntype: h.clone().requires_grad_() for ntype, h in features.items()}
    model = TwoLayers()
    return typed_gradients(model(blocks, x), cotangents, x, model)


def global_ids(data, rows):
    """Global IDs of rows within types, type after type."""
    ids, kinds = data.node_features["_ID"], data.node_features["_TYPE"]
    return torch.cat([ids[kinds == data.node_type_names.index(ntype)][index] for ntype, index in rows.items()])


def mfgs_on_worker(path, seeds, mode):
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    sar.Config.disable_sr = mode == 2
    blocks = sar.construct_mfgs(data, global_ids(data, seeds) if mode == 2 else seeds, 2)
    if mode == 3:
        blocks = [block.get_full_partition_graph() for block in blocks]
    assert all(torch.equal(found, seeds.get(t, found[:0])) for t, found in blocks[-1].seeds.items())
    rows = blocks[0].input_nodes
    features = {t: data.node_features[f"{t}/x"][rows[t]] for t in rows}
    cotangents = {t: data.node_features[f"{t}/cotangent"][seeds.get(t, torch.empty(0).long())] for t in COUNTS}
    return train_on_blocks(blocks, features, cotangents), rows


@pytest.mark.parametrize("num_parts, world_size", [corner(2, 2), (3, 3), (5, 2), corner(2, 3)])
def test_message_flow_graphs_of_several_types(pool, num_parts, world_size, directory):
    path, node_map = directory(num_parts)
    graph = whole_graph()
    counts = pool.run(own_counts, str(path))
    generator = torch.Generator().manual_seed(6)
    # Seeds of two types, in no order; the first worker has none of the second.
    seeds = [
        {
            ntype: torch.randperm(count[ntype], generator=generator)[: 5 * (rank > 0 or ntype == "paper")]
            for ntype in ("paper", "author")
        }
        for rank, count in enumerate(counts)
    ]
    starts = [{t: sum(count[t] for count in counts[:rank]) for t in COUNTS} for rank in range(world_size)]

    def original(by_rank):
        return {
            t: torch.cat([node_map[t][rows[t] + starts[rank][t]] for rank, rows in enumerate(by_rank) if t in rows])
            for t in by_rank[0]
        }

    wanted = original(seeds)
    blocks, targets = [], wanted
    for _ in range(2):
        block = dgl.to_block(dgl.in_subgraph(graph, targets), targets)
        targets = {t: block.srcnodes[t].data[dgl.NID] for t in COUNTS}
        blocks.insert(0, block)
    none = torch.empty(0, dtype=torch.int64)
    cotangents = {t: graph.nodes[t].data["cotangent"][wanted.get(t, none)] for t in COUNTS}
    inputs = {t: graph.nodes[t].data["x"][ids] for t, ids in targets.items()}
    expected = train_on_blocks(blocks, inputs, cotangents)
    for mode in (1, 2, 3):
        by_rank = pool.run(_with_seeds, str(path), mode, per_rank=seeds)
        read = original([rows for _, rows in by_rank])
        results, order = [result for result, _ in by_rank], {}
        for ntype in COUNTS:
            assert sorted(read[ntype].tolist()) == sorted(targets[ntype].tolist())
            place = {node: row for row, node in enumerate(targets[ntype].tolist())}
            order[f"node {ntype}.grad"] = torch.tensor([place[node] for node in read[ntype].tolist()]).long()
        for key, value in expected.items():
            if key.startswith("same "):
                assert_close(results[0][key], value)
            elif len(value):
                assert_close(torch.cat([result[key] for result in results]), value[order.get(key, slice(None))])


def own_counts(path):
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    return {t: len(data.node_features[f"{t}/x"]) for t in COUNTS}


def _with_seeds(seeds, path, mode):
    return mfgs_on_worker(path, seeds, mode)
