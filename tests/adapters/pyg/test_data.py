"""PyTorch Geometric's data from partitions, and batches as its `NeighborLoader` makes them."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import k_hop_subgraph

import sar
from tests.graphs import random_graph
from tests.matrix import THREAD


def make_data():
    edges = random_graph(2, 60, 400)
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(60, 5, generator=generator, dtype=torch.float64),
        y=torch.randint(3, (60,), generator=generator),
        train_mask=torch.rand(60, generator=generator) < 0.6,
        edge_index=torch.stack([edges.src, edges.dst]),
        edge_weight=torch.rand(len(edges.src), generator=generator, dtype=torch.float64),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    sar.partition_graph(make_data(), "graph", 2, str(folder), part_method="random")
    return str(folder)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GCNConv(5, 8), GCNConv(8, 3)

    def forward(self, data):
        h = self.first(data.x, data.edge_index, data.edge_weight).relu()
        return self.last(h, data.edge_index, data.edge_weight)


def train(data, num_train):
    torch.manual_seed(1)
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        out = model(data)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="sum") / num_train
        optimizer.zero_grad()
        loss.backward()
        if sar.comm.is_initialized():
            sar.gather_grads(model)
            loss = sar.all_sum(loss.detach())
        optimizer.step()
        losses.append(loss.item())
    return losses, model(data).detach()


def train_on_worker(directory):
    data = sar.pyg.load_partition(directory)
    losses, out = train(data, sar.all_sum(int(data.train_mask.sum())))
    return losses, out, data.orig_id, data.edge_attrs()


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_from_a_directory(pool, world_size, directory):
    whole = make_data()
    losses, out = train(whole, int(whole.train_mask.sum()))
    for found, rows, ids, attributes in pool.run(train_on_worker, directory):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(rows, out[ids], rtol=1e-9, atol=1e-9)
        assert set(attributes) >= {"edge_index", "edge_weight"}


def batches_on_worker(directory, fanouts, num_workers):
    data = sar.pyg.load_partition(directory)
    graph = data.edge_index.graph
    sampler = sar.DistNeighborSampler(
        fanouts, input_node_features={"feat": data.x}, output_node_features={"label": data.y}
    )
    seeds = torch.arange(*graph.node_ranges[sar.rank()])
    loader = sar.DataLoader(graph, seeds, sampler, batch_size=10, format="pyg", num_workers=num_workers)
    nodes, edges = (
        torch.cat(sar.comm.exchange_tensors([ids.long()] * sar.world_size()))
        for ids in (data.orig_id, torch.stack([graph.edata["_ID"], data.edge_orig_id.long()], 1))
    )
    return [(batch.to_dict(), nodes, edges) for batch in loader]


@pytest.mark.parametrize("fanouts, num_workers", [([-1, -1], 0), pytest.param([-1, -1], 1, marks=THREAD), ([2, 3], 0)])
@pytest.mark.parametrize("world_size", [2])
def test_batches_are_those_of_neighbor_loader(pool, fanouts, num_workers, directory):
    whole = make_data()
    in_degrees = torch.bincount(whole.edge_index[1], minlength=60)
    seen = []
    for batches in pool.run(batches_on_worker, directory, fanouts, num_workers):
        for batch, original, edge_ids in batches:
            original_edges = torch.empty(len(edge_ids), dtype=torch.int64)
            original_edges[edge_ids[:, 0]] = edge_ids[:, 1]
            ids = original[batch["n_id"]]
            seeds = ids[: batch["batch_size"]]
            seen.append(seeds)
            assert torch.equal(batch["x"], whole.x[ids])
            assert torch.equal(batch["y"], whole.y[seeds])
            edges = ids[batch["edge_index"]]
            # NeighborLoader itself needs compiled packages. It draws at the seeds and at their neighbors.
            expanded = k_hop_subgraph(seeds, 1, whole.edge_index, num_nodes=60)[0]
            expected = whole.edge_index[:, torch.isin(whole.edge_index[1], expanded)]
            pairs, all_pairs = (sorted(map(tuple, e.T.tolist())) for e in (edges, expected))
            assert torch.equal(whole.edge_index[:, original_edges[batch["e_id"]]], edges)
            if fanouts == [-1, -1]:
                assert pairs == all_pairs
                assert sorted(ids.tolist()) == torch.cat([expected[0], expanded]).unique().tolist()
            else:
                assert set(pairs) <= set(all_pairs)
                drawn = torch.bincount(batch["edge_index"][1], minlength=len(ids))
                # The seeds draw in the last layer's fan-out.
                assert torch.equal(drawn[: len(seeds)], in_degrees[seeds].clamp(max=3))
                assert set(torch.unique(batch["edge_index"]).tolist()) | set(range(len(seeds))) == set(range(len(ids)))
    assert sorted(torch.cat(seen).tolist()) == list(range(60))


def hetero_on_worker(directory):
    data = sar.pyg.load_partition(directory)
    conv = SAGEConv((4, 3), 2).double()
    with torch.no_grad():
        for value in conv.parameters():
            value.fill_(0.5)
    out = conv((data["author"].x, data["paper"].x), data["author", "writes", "paper"].edge_index)
    sampler = sar.DistNeighborSampler([-1], input_node_features={f"{t}/feat": data[t].x for t in data.node_types})
    papers = torch.arange(len(out))
    seen = []
    for batch in sar.DataLoader(data.graph, {"paper": papers}, sampler, 4, format="pyg"):
        sampled = conv((batch["author"].x, batch["paper"].x), batch["author", "writes", "paper"].edge_index)
        own = batch["paper"].n_id[: batch["paper"].batch_size] - data.graph.node_ids("paper")[0]
        torch.testing.assert_close(sampled[: len(own)], out[own], rtol=1e-9, atol=1e-9)
        seen.append(own)
    assert torch.equal(torch.cat(seen).sort().values, papers)
    return out.detach(), data["paper"].orig_id if "orig_id" in data["paper"] else None


@pytest.mark.parametrize("world_size", [2])
def test_several_types_from_a_directory(pool, tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["author"].x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    data["paper"].x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    ends = [torch.randint(count, (90,), generator=generator) for count in (20, 30)]
    data["author", "writes", "paper"].edge_index = torch.stack(ends)
    sar.partition_graph(data, "graph", 2, str(tmp_path), part_method="random")
    conv = SAGEConv((4, 3), 2).double()
    with torch.no_grad():
        for value in conv.parameters():
            value.fill_(0.5)
    expected = conv((data["author"].x, data["paper"].x), data["author", "writes", "paper"].edge_index).detach()
    found = torch.cat([rows for rows, _ in pool.run(hetero_on_worker, str(tmp_path))])
    torch.testing.assert_close(found.sort(0).values, expected.sort(0).values, rtol=1e-9, atol=1e-9)


def typed_graph():
    """A graph as `dgl.to_homogeneous` makes it, with names that `Data` or edges have, too."""
    dgl = pytest.importorskip("dgl")
    edges, generator = random_graph(2, 60, 400), torch.Generator().manual_seed(0)
    graph = dgl.graph((edges.src, edges.dst), num_nodes=60)
    graph.ndata.update({"_TYPE": torch.arange(60) // 20, "feat": torch.randn(60, 5, generator=generator).double()})
    graph.edata["_TYPE"] = torch.randint(3, (400,), generator=generator)
    for name in ("num_nodes", "w", "edge_w", "a/b", "n_id"):
        graph.ndata[name], graph.edata[name] = torch.arange(60), torch.arange(400)
    return graph


NODE_FIELDS = {"node_num_nodes", "w", "edge_w", "a/b", "n_id"}
EDGE_FIELDS = {"edge_num_nodes", "edge_edge_w", "edge_edge_edge_w", "edge_a/b", "edge_n_id"}


def apply_rgcn(x, edge_index, edge_type):
    torch.manual_seed(1)
    return pyg.RGCNConv(5, 4, num_relations=3).double()(x, edge_index, edge_type).detach()


def typed_on_worker(directory):
    data = sar.pyg.load_partition(directory)
    for names, ids in ((NODE_FIELDS, data.orig_id), (EDGE_FIELDS, data.edge_orig_id)):
        assert all(torch.equal(data[name], ids) for name in names), "no field takes the place of another"
    inputs = {"feat": data.x, "orig_id": data.orig_id, "_TYPE": data.node_type}
    sampler = sar.DistNeighborSampler([-1], input_node_features=inputs)
    [batch] = sar.DataLoader(data.graph, data.graph.node_ids(), sampler, 60, format="pyg")
    sampled = apply_rgcn(batch.x, batch.edge_index, batch.edge_type)[: batch.batch_size]
    assert torch.equal(batch.node_type, batch.orig_id // 20)
    return apply_rgcn(data.x, data.edge_index, data.edge_type), sampled, data.orig_id, data.node_type


@pytest.mark.parametrize("world_size", [2])
def test_no_field_of_a_directory_is_lost(pool, tmp_path):
    graph = typed_graph()
    sar.partition_graph(graph, "graph", 2, str(tmp_path), part_method="random")
    expected = apply_rgcn(graph.ndata["feat"], torch.stack(graph.edges()), graph.edata["_TYPE"])
    for out, sampled, ids, kinds in pool.run(typed_on_worker, str(tmp_path)):
        for found in (out, sampled):
            torch.testing.assert_close(found, expected[ids], rtol=1e-9, atol=1e-9)
        assert torch.equal(kinds, ids // 20)


def several_graphs():
    """Nine graphs of one data set."""
    graphs = []
    for number in range(9):
        edges, generator = random_graph(number, 4 + number, 20), torch.Generator().manual_seed(number)
        x = torch.randn(4 + number, 5, generator=generator, dtype=torch.float64)
        graphs.append(Data(x=x, edge_index=torch.stack([edges.src, edges.dst]), num_nodes=4 + number))
    return Batch.from_data_list(graphs)


def read_out(data, count, pool):
    torch.manual_seed(1)
    model, last = pyg.GCN(5, 6, 2, 4, norm="graph_norm").double(), pyg.Set2Set(4, 2).double()
    h = model(data.x, data.edge_index, batch=data.batch)
    some = h[:, 0] > 0
    parts = [
        pool(h, data.batch, count),
        pyg.global_max_pool(h[some], data.batch[some], count),
        last(h, data.batch),
        pool(h[data.edge_index[1]], data.batch[data.edge_index[0]], count),  # of the edges
    ]
    out = torch.cat(parts, 1)
    (out.square().sum() / (sar.world_size() if sar.comm.is_initialized() else 1)).backward()
    return out.detach(), [value.grad for value in (*model.parameters(), *last.parameters())]


def read_out_on_worker(directory, count):
    data = sar.pyg.load_partition(directory)
    out, grads = read_out(data, count, pyg.global_mean_pool)
    return out, [sar.all_sum(grad) for grad in grads]


@pytest.mark.parametrize("one_graph", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_graphs_across_workers(pool, world_size, one_graph, tmp_path):
    """Layers of PyTorch Geometric that are given `data.batch`, as they are."""
    whole = several_graphs()
    data = Data(whole.x, whole.edge_index) if one_graph else Data(whole.x, whole.edge_index, batch=whole.batch)
    sar.partition_graph(data, "graph", 2, str(tmp_path), part_method="random")
    data.batch = torch.zeros(len(whole.x), dtype=torch.int64) if one_graph else whole.batch
    count = 1 if one_graph else 9
    for found in pool.run(read_out_on_worker, str(tmp_path), count):
        torch.testing.assert_close(found, read_out(data, count, pyg.global_mean_pool), rtol=1e-9, atol=1e-9)
