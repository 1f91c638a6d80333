"""Scripts written for `adj_t` and for OGB's lists of nodes: what is partitioned, and what layers are called with."""

import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data, HeteroData

import sar
from sar.errors import ConfigError, GraphError
from sar.partition.ingest.objects import from_object
from tests.graphs import random_graph

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # torch's own, of its sparse matrices

EDGES = random_graph(3, 40, 300, multi_edges=False, self_loops=False)


def data_of(**fields):
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Data(x, torch.stack([EDGES.src, EDGES.dst]), **fields)


class OfTorchSparse:
    """What of `torch_sparse.SparseTensor` is read."""

    def __init__(self, row, col, value):
        self.entries = row, col, value

    def coo(self):
        return self.entries


def sparse(layout, weights):
    """The data with `adj_t` in place of `edge_index`, made by PyTorch Geometric but for that of torch_sparse."""
    fields = {} if weights is None else {"edge_weight": weights}
    if layout != "torch_sparse":
        return T.ToSparseTensor(layout=layout)(data_of(**fields))
    data = data_of()
    data.adj_t = OfTorchSparse(EDGES.dst, EDGES.src, weights)
    data.num_nodes = 40
    del data.edge_index
    return data


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo, "torch_sparse"], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_edges_of_a_matrix(layout, weighted):
    weights = torch.rand(len(EDGES.src), dtype=torch.float64) if weighted else None
    graph = from_object(sparse(layout, weights))
    [(etype, edges)] = graph.edges.items()
    src, dst = edges.read(0, edges.num_edges)
    found = dict(zip(zip(src.tolist(), dst.tolist(), strict=True), range(len(src)), strict=True))
    pairs = list(zip(EDGES.src.tolist(), EDGES.dst.tolist(), strict=True))
    assert len(src) == len(pairs)
    assert found.keys() == set(pairs)
    assert graph.edge_data[etype].keys() == ({"edge_weight"} if weighted else set())
    if weighted:
        assert graph.edge_data[etype]["edge_weight"][[found[pair] for pair in pairs]].tolist() == weights.tolist()
    assert set(graph.node_data["_N"]) == {"x"}


def use_others(weighted, unweighted, hetero):
    part = sar.pyg.load_partition(weighted)
    with pytest.raises(GraphError, match="pass edge_index, and beside it edge_weight"):
        _ = part.adj_t
    with pytest.raises(GraphError, match=r"Pass edge_index, which data\.adj_t"):
        T.ToSparseTensor()(part)
    with pytest.raises(AttributeError, match="no 'set_diag'; use a sparse adj_t before partitioning"):
        _ = part.edge_index.set_diag
    plain = sar.pyg.load_partition(unweighted)
    assert plain.adj_t is plain.edge_index
    part = sar.pyg.load_partition(hetero)
    same = all(part.adj_t_dict[etype] is part[etype].edge_index for etype in part.edge_types)
    return same, {t: (part[t].train_mask, part[t].orig_id) for t in part.node_types if "train_mask" in part[t]}


@pytest.mark.parametrize("world_size", [1])
def test_weights_types_and_what_a_matrix_can(pool, tmp_path):
    sar.partition_graph(sparse(torch.sparse_csr, torch.rand(len(EDGES.src))), "graph", 2, tmp_path / "weighted")
    sar.partition_graph(sparse(torch.sparse_csr, None), "graph", 2, tmp_path / "unweighted")
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 30, 20
    data["a", "to", "b"].edge_index = torch.randint(20, (2, 50))
    data["b", "to", "b"].edge_index = torch.randint(20, (2, 50))
    ids = {"b": torch.tensor([19, 3])}
    sar.partition_graph(T.ToSparseTensor()(data), "graph", 2, tmp_path / "hetero", split_idx={"train": ids})
    [(same, masks)] = pool.run(use_others, *(tmp_path / name for name in ("weighted", "unweighted", "hetero")))
    assert same
    assert masks.keys() == {"b"}
    mask, orig = masks["b"]
    assert sorted(orig[mask].tolist()) == [3, 19]


def test_lists_of_nodes_become_masks(tmp_path):
    lists = {"train": torch.arange(20), "valid": torch.tensor([30, 25]), "test": torch.arange(31, 40).numpy()}
    sar.partition_graph(data_of(), "graph", 2, tmp_path / "parts", split_idx=lists)
    found = {name: [] for name in lists}
    for part in range(2):
        fields = sar.load_dgl_partition_data(tmp_path / "parts", part, "cpu").node_features
        for name, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
            found[name] += fields["orig_id"][fields[f"_N/{mask}"].bool()].tolist()
    assert {name: sorted(ids) for name, ids in found.items()} == {n: sorted(ids.tolist()) for n, ids in lists.items()}


@pytest.mark.parametrize(
    "fields, split_idx, words",
    [
        ({}, {"all": torch.arange(3)}, "split_idx has 'all'; expected node IDs by train, val, valid, test"),
        ({}, {"train": torch.tensor([40])}, "IDs of the 40 nodes"),
        ({}, {"train": torch.tensor([-1])}, "IDs of the 40 nodes"),
        ({}, {"train": torch.tensor([True, False])}, "IDs of the 40 nodes"),
        ({}, {"train": {"paper": torch.arange(3)}}, "train_mask must be by type; expected some of _N"),
        ({"train_mask": torch.ones(40).bool()}, {"train": torch.arange(3)}, "'_N' already has train_mask"),
    ],
)
def test_lists_that_are_refused(tmp_path, fields, split_idx, words):
    with pytest.raises(ConfigError, match=words):
        sar.partition_graph(data_of(**fields), "graph", 2, tmp_path / "parts", split_idx=split_idx)


def test_matrices_that_are_refused(tmp_path):
    data = T.ToSparseTensor(attr="edge_attr")(data_of(edge_attr=torch.rand(len(EDGES.src), 3)))
    with pytest.raises(ConfigError, match=r"values of shape .* give edge_index and edge_attr"):
        sar.partition_graph(data, "graph", 2, tmp_path / "parts")
    data.adj_t = torch.rand(40, 40)
    with pytest.raises(ConfigError, match="adj_t is a Tensor; expected a sparse matrix"):
        sar.partition_graph(data, "graph", 2, tmp_path / "parts")
