"""With all neighbours sampled, models on the blocks give what they give on the whole graph, gradients included."""

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch

import sar
from sar.adapters.dgl.graphs import make_block
from tests.hetero_graphs import COUNTS, OUT, RELATIONS, partition_hetero, whole_graph
from tests.parity.blocks import some_seeds
from tests.parity.harness import assert_close, parameter_gradients, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS
from tests.parity.test_hetero import hetero_conv


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList([dglnn.SAGEConv(6, 5, "mean"), dglnn.SAGEConv(5, 4, "gcn")]).double()

    def forward(self, graphs, x):
        hidden = torch.tanh(self.layers[0](graphs[0], x, graphs[0].edata["w"]))
        return self.layers[1](graphs[1], hidden, graphs[1].edata["w"])


def train(mine):
    partition, seeds, data = mine
    graph = sar.construct_full_graph(partition)
    sampler = sar.DistNeighborSampler(
        [-1, -1], input_node_features={"x": data["x"]}, output_node_features={"cotangent": data["cotangent"]}
    )
    loader = sar.DataLoader(graph, seeds, sampler, batch_size=3, shuffle=True)
    model, outputs = Model(), []
    for blocks in loader:
        out = model(blocks, blocks[0].srcdata.pop("x"))
        weighted_sum(out, blocks[-1].dstdata["cotangent"]).backward()
        outputs.append((blocks[-1].dstdata[dgl.NID], out.detach()))
    ids, rows = (torch.cat(pieces) for pieces in zip(*outputs, strict=True))
    return ids, rows, parameter_gradients(model)


@pytest.mark.parametrize("scenario", ["random", "isolated", "first worker without nodes", "star"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_neighbours_are_the_whole_graph(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    data = random_data(parts, torch.float64)
    whole = parts.reference()
    whole.edata["w"] = data.edges["w"]
    seeds = some_seeds(parts, "uneven")
    nodes = {name: parts.split_nodes(rows) for name, rows in data.nodes.items()}
    weights = parts.split_edges(data.edges["w"])
    given = []
    for rank, partition in enumerate(parts.partitions):
        counts = [len(shard.edges[0]) for shard in partition.all_shard_edges]
        for shard, w in zip(partition.all_shard_edges, weights[rank].split(counts), strict=True):
            shard.edge_features["w"] = w
        given.append((partition, seeds[rank], {name: rows[rank] for name, rows in nodes.items()}))
    model, everyone = Model(), torch.cat(seeds)
    expected = model([whole, whole], data.nodes["x"])
    weighted_sum(expected[everyone], data.nodes["cotangent"][everyone]).backward()
    for rank, (ids, rows, gradients) in enumerate(pool.run(train, per_rank=given)):
        assert torch.equal(ids.sort().values, seeds[rank].sort().values)
        assert_close(rows, expected[ids].detach())
        for name, value in parameter_gradients(model).items():
            assert_close(gradients[name], value)


def train_hetero(partition, fanouts):
    graph = sar.construct_full_graph(partition)
    features = {name: x for name, x in partition.node_features.items() if name.endswith("/x")}
    sampler = sar.DistNeighborSampler(fanouts, input_node_features=features)
    seeds = {t: torch.arange(graph.num_nodes(t)).flip(0) for t in COUNTS}
    (block,) = sampler.sample(graph, seeds)
    torch.manual_seed(3)
    _, outputs = hetero_conv("sum", block, block.srcdata["x"])
    for ntype in COUNTS:
        assert torch.equal(block.dstnodes[ntype].data[dgl.NID].flip(0), graph.node_ids(ntype))
    degrees = {etype: block.in_degrees(etype=etype).flip(0) for etype in RELATIONS}
    ids = {etype: dict(block.edges[etype].data) for etype in RELATIONS}
    return {t: out.detach().flip(0) for t, out in outputs.items()}, degrees, ids


@pytest.mark.parametrize("without", [(), ("topic",)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_several_relations(pool, world_size, without):
    whole = whole_graph(without)
    generator = torch.Generator().manual_seed(0)
    assignment = {t: torch.randint(world_size, (whole.num_nodes(t),), generator=generator) for t in COUNTS}
    parts = partition_hetero(whole, assignment, world_size)
    torch.manual_seed(3)
    _, expected = hetero_conv("sum", whole, whole.ndata["x"])
    results = pool.run(train_hetero, [-1], per_rank=parts.partitions)
    for ntype, out in expected.items():
        assert out.shape[1] == OUT
        assert_close(torch.cat([outputs[ntype] for outputs, _, _ in results]), out[parts.node_ids[ntype]].detach())
    fanouts = {etype: number for number, etype in enumerate(RELATIONS)}
    for _, degrees, fields in pool.run(train_hetero, [fanouts], per_rank=parts.partitions):
        for etype, fanout in fanouts.items():
            original = fields[etype]["orig_id"]
            assert torch.equal(fields[etype]["w"], whole.edges[etype].data["w"][original])
            assert len(original.unique()) == len(original) == int(degrees[etype].sum())
            assert max(degrees[etype].tolist(), default=0) <= fanout


@pytest.mark.parametrize("num_dst", [0, 3])
def test_attention_in_single_precision(num_dst):
    """DGL's kernels for float32 are others than for float64, and want the IDs of edges where they sum edge values."""
    etype, src = ("_N", "_E", "_N"), torch.tensor([0, 4, 2])[:num_dst]
    indptr = torch.tensor([0, 2, 3, 3])[: num_dst + 1]
    block = make_block({"_N": torch.arange(5)}, {"_N": num_dst}, {etype: (indptr, src, {})})
    plain = dgl.create_block((src, torch.tensor([0, 0, 1])[:num_dst]), num_src_nodes=5, num_dst_nodes=num_dst)
    torch.manual_seed(2)
    layer, x, found = dglnn.GATConv(8, 4, 2, allow_zero_in_degree=True), torch.randn(5, 8), []
    for graph in (block, plain):
        rows = x.clone().requires_grad_()
        out = layer(graph, rows)
        out.square().sum().backward()
        found.append((out.detach(), rows.grad))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)
