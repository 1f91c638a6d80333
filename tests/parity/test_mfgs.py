"""Message flow graphs: outputs at the seeds, and all gradients, equal those of DGL's blocks on one machine."""

from itertools import pairwise

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sar
from tests.matrix import corner
from tests.parity.blocks import reference_blocks, some_seeds
from tests.parity.harness import assert_close, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS

WIDTHS = (6, 5, 4)


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList([make(i, o) for i, o in pairwise(WIDTHS)])

    def forward(self, blocks, x, weights):
        for layer, block, weight in zip(self.layers, blocks, weights, strict=True):
            x = layer(block, x) if weight is None else layer(block, x, edge_weight=weight.squeeze(1))
            x = x.flatten(1).tanh()
        return x


class Attention(nn.Module):
    """GATv2 with one head, and a message function of its own beside it."""

    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.conv = dglnn.GATv2Conv(in_feats, out_feats, 1, allow_zero_in_degree=True)
        self.gate = nn.Linear(in_feats, out_feats)

    def forward(self, block, x):
        with block.local_scope():
            block.srcdata["h"] = x
            block.update_all(lambda edges: {"m": self.gate(edges.src["h"])}, fn.max("m", "o"))
            return self.conv(block, x).squeeze(1) + block.dstdata["o"]


MODELS = {
    "gcn": (lambda i, o: dglnn.GraphConv(i, o, norm="both", allow_zero_in_degree=True), False),
    "weighted": (lambda i, o: dglnn.GraphConv(i, o, norm="both", allow_zero_in_degree=True), True),
    "sage pool": (lambda i, o: dglnn.SAGEConv(i, o, "pool"), False),
    "sage lstm": (lambda i, o: dglnn.SAGEConv(i, o, "lstm"), False),
    "gin": (lambda i, o: dglnn.GINConv(nn.Linear(i, o), "sum"), False),
    "gat": (lambda i, o: dglnn.GATConv(i, o, 1, residual=True, allow_zero_in_degree=True), False),
    "attention": (Attention, False),
}


def step(blocks, x, edge_weights, cotangent, name):
    torch.manual_seed(5)
    make, weighted = MODELS[name]
    model = Model(make).double()
    x = x.clone().requires_grad_()
    weights = [w.clone().requires_grad_() for w in edge_weights] if weighted else [None] * len(blocks)
    out = model(blocks, x, weights)
    weighted_sum(out, cotangent).backward()
    if dist.is_initialized():
        sar.gather_grads(model)
    grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, [w.grad for w in weights if w is not None], grads


def on_worker(partition, seeds, x, w, cotangent, mode, names):
    sar.patch_dgl()
    sar.Config.disable_sr = mode == 2
    blocks = sar.construct_mfgs(partition, seeds, 2)
    assert torch.equal(blocks[-1].seeds, seeds)
    assert all(torch.equal(block.input_nodes[: block.num_dst_nodes()] + _first(block), block.seeds) for block in blocks)
    assert all(block.is_block for block in blocks)
    if mode == 3:
        blocks = [block.get_full_partition_graph() for block in blocks]
    weights = [block.edata["w"] for block in blocks]
    inputs = x[blocks[0].input_nodes]
    results = [step(blocks, inputs, weights, cotangent, name) for name in names]
    degrees = [(block.in_degrees(), block.out_degrees()) for block in blocks]
    globals_ = [(b.num_nodes_global(), b.num_edges_global()) for b in blocks]
    return results, blocks[0].input_nodes + _first(blocks[0]), [b.edata["_ID"] for b in blocks], degrees, globals_


def _first(block):
    return block.node_ranges[sar.rank()][0]


@pytest.mark.parametrize("scenario", ["random", "isolated", "first worker without nodes", "star"])
@pytest.mark.parametrize("how", ["few", "uneven", "last only", "all"])
@pytest.mark.parametrize("world_size", [corner(2), 3])
def test_message_flow_graphs(pool, world_size, scenario, how):
    parts = SCENARIOS[scenario](world_size)
    data = random_data(parts, torch.float64)
    seeds = some_seeds(parts, how)
    blocks, visible = reference_blocks(parts.original(), torch.cat(seeds), 2), parts.edge_ids.argsort()
    for block in blocks:
        block.edata["edge"] = visible[block.edata["edge"]]
    # On a worker without edges DGL's maximum and LSTM have no gradient where sar's have zeros.
    names = [name for name in MODELS if scenario == "random" or name not in ("sage lstm", "sage pool", "attention")]
    inputs = blocks[0].srcdata[dgl.NID]
    weights = [data.edges["w"][block.edata["edge"]] for block in blocks]
    cotangent = data.nodes["cotangent"][torch.cat(seeds)]
    expected = [step(blocks, data.nodes["x"][inputs], weights, cotangent, name) for name in names]
    partitions = [
        p._replace(all_shard_edges=[s._replace(edge_features={**s.edge_features}) for s in p.all_shard_edges])
        for p in parts.partitions
    ]
    for partition, w in zip(partitions, parts.split_edges(data.edges["w"]), strict=True):
        sizes = [len(shard.edges[0]) for shard in partition.all_shard_edges]
        for shard, piece in zip(partition.all_shard_edges, w.split(sizes), strict=True):
            shard.edge_features["w"] = piece
    x, cotangents = parts.split_nodes(data.nodes["x"]), cotangent.split([len(s) for s in seeds])
    ids = torch.cat([shard.edge_features["_ID"] for p in partitions for shard in p.all_shard_edges])
    for mode in (1, 2, 3):
        mine = list(zip(partitions, seeds, x, parts.split_edges(data.edges["w"]), cotangents, strict=True))
        by_rank = pool.run(_spread, mode, names, per_rank=mine, timeout=100)
        nodes = torch.cat([results[1] for results in by_rank])
        assert sorted(nodes.tolist()) == sorted(inputs.tolist())
        place = {node: row for row, node in enumerate(inputs.tolist())}
        order = torch.tensor([place[node] for node in nodes.tolist()], dtype=torch.int64)
        for number in range(len(names)):
            out, x_grad, w_grads, grads = expected[number]
            parts_of = [results[0][number] for results in by_rank]
            assert_close(torch.cat([p[0] for p in parts_of]), out)
            assert_close(torch.cat([p[1] for p in parts_of]), x_grad[order])
            for depth, grad in enumerate(w_grads):
                edges = torch.cat([results[2][depth] for results in by_rank])
                assert sorted(edges.tolist()) == sorted(ids[blocks[depth].edata["edge"]].tolist())
                assert_close(torch.cat([p[2][depth] for p in parts_of]).sum(), grad.sum())
            for key, grad in grads.items():
                assert_close(parts_of[0][3][key], grad)
        for depth, block in enumerate(blocks):
            found = {results[4][depth] for results in by_rank}
            assert found == {(block.num_src_nodes() + block.num_dst_nodes(), block.num_edges())}
        degrees = torch.cat([results[3][0][1] for results in by_rank])
        assert torch.equal(degrees, blocks[0].out_degrees()[order])


def _spread(mine, *args):
    return on_worker(*mine, *args)


def sources_only(partition, seeds):
    rows = {"_N": seeds - partition.node_ranges[sar.rank()][0]}
    blocks = sar.construct_mfgs(partition, rows, 2, keep_seed_nodes=False)
    x = torch.ones(blocks[0].num_src_nodes(), 1)
    for block in blocks:
        block.srcdata["h"] = x
        block.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
        x = block.dstdata["h"]
    read = [bool((block.out_degrees() > 0).all()) for block in blocks]
    return x, read


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_seeds_sources_are_what_is_read(pool, world_size):
    parts = SCENARIOS["isolated"](world_size)
    seeds = some_seeds(parts, "few")
    outcomes = pool.run(_sources, per_rank=list(zip(parts.partitions, seeds, strict=True)))
    graph = parts.reference()
    adjacency = torch.zeros(parts.num_nodes, parts.num_nodes)
    adjacency.index_put_((graph.edges()[1], graph.edges()[0]), torch.tensor(1.0), accumulate=True)
    walks = (adjacency @ adjacency).sum(1, keepdim=True)[torch.cat(seeds)]
    assert torch.equal(torch.cat([x for x, _ in outcomes]), walks)
    assert all(all(read) for _, read in outcomes)


def _sources(mine):
    return sources_only(*mine)


BAD_SEEDS = {
    "foreign": lambda first, last: torch.tensor([last]),
    "negative": lambda first, last: torch.tensor([-1]),
    "twice": lambda first, last: torch.tensor([first, first]),
    "floating": lambda first, last: torch.tensor([float(first)]),
    "of an unknown type": lambda first, last: {"paper": torch.tensor([first])},
    "foreign rows": lambda first, last: {"_N": torch.tensor([last - first])},
}


def bad_seeds(partition, how):
    if sar.rank() == 0:
        return sar.construct_mfgs(partition, BAD_SEEDS[how](*partition.node_ranges[0]), 2)
    return sar.construct_mfgs(partition, torch.empty(0, dtype=torch.int64), 2)


@pytest.mark.parametrize("how", BAD_SEEDS)
@pytest.mark.parametrize("world_size", [2])
def test_bad_seeds_are_refused_everywhere(pool, world_size, how):
    parts = SCENARIOS["random"](world_size)
    outcomes = pool.outcomes(bad_seeds, how, per_rank=parts.partitions)
    assert [outcome.kind for outcome in outcomes] == ["GraphError", *["PeerError"] * (world_size - 1)]
    assert all("seed_nodes" in outcome.message for outcome in outcomes)
