"""SuperGATConv's loss in training: shares add up to one machine's, and pairs that are drawn are none of the graph's."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg

import sar
from sar.adapters.pyg.edge_index import edges_of as index_of
from sar.errors import GraphError
from tests.parity.harness import build, check, deal, parameter_gradients, random_data, weighted_sum
from tests.parity.pyg_layers import IN, OUT, edges_of
from tests.parity.scenarios import SCENARIOS


def loss(graph, data, kind, count):
    """Outputs and loss with pairs that each worker gives some of."""
    torch.manual_seed(3)
    layer = pyg.SuperGATConv(IN, OUT, heads=2, attention_type=kind).double()
    src, dst = torch.randint(count, (2, 50), generator=torch.Generator().manual_seed(1))
    pairs = torch.stack([src, dst])
    if dist.is_initialized():
        rank, workers = sar.rank(), sar.world_size()
        pairs = sar.pyg.edge_index(sar.pair_graph(graph, src[rank::workers], dst[rank::workers]))
    x = data.leaf("x")
    out = layer(x, edges_of(graph), neg_edge_index=pairs)
    total = layer.get_attention_loss()
    (weighted_sum(out, data.nodes["cotangent"]) + 10 * total).backward()
    return {"node out": out, "sum loss": total, "node x.grad": x.grad, **parameter_gradients(layer)}


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [2])
def test_shares_of_the_loss(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(loss, (kind, parts.num_nodes)) for kind in ("MX", "SD")]
    check(pool, parts, random_data(parts, torch.float64), cases)


def drawn(mine):
    """Global IDs of pairs drawn into this worker, how many were wanted, and a training step with such pairs."""
    graph, data = build(mine[0], 1), mine[1]
    layer, edges, x = pyg.SuperGATConv(IN, OUT, edge_sample_ratio=0.9).double(), index_of(graph), data.leaf("x")
    with pytest.raises(GraphError, match=r"sar\.pair_graph"):
        layer(x, edges, torch.zeros(2, 1, dtype=torch.int64))
    layer(x, edges)
    layer.get_attention_loss().backward()
    assert x.grad.isfinite().all()
    torch.manual_seed(sar.rank())
    pairs = layer.negative_sampling(edges, graph.num_nodes())
    ids = graph.node_ids()
    return torch.stack([ids[pairs[0]], ids[pairs[1]]]), int(0.5 * 0.9 * edges.size(1))


@pytest.mark.parametrize("scenario", ["random", "first worker without nodes", "no edges"])
@pytest.mark.parametrize("world_size", [2])
def test_pairs_that_are_drawn(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    found = pool.run(drawn, per_rank=deal(parts, random_data(parts, torch.float64)))
    edges = set(zip(parts.src.tolist(), parts.dst.tolist(), strict=True))
    ends = torch.tensor(parts.node_counts).cumsum(0)
    for rank, (pairs, wanted) in enumerate(found):
        owners = torch.bucketize(pairs, ends, right=True)
        assert bool((owners[1] == rank).all())
        assert scenario != "random" or len(owners[0].unique()) > 1
        pairs = list(zip(*pairs.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs) == wanted
        assert not any((u, v) in edges or (v, u) in edges or u == v for u, v in pairs)
