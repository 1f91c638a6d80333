"""Functions of `torch_geometric.utils` and transforms on a distributed edge index: exact, refused, or local."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import transforms, utils
from torch_geometric.data import Data

from tests.parity.harness import Data as Rows
from tests.parity.harness import Results
from tests.parity.pyg_layers import edges_of


class Graph(NamedTuple):
    """What a case is given: an edge index (2, E), x (N, 6), rows by name, and a mask (N,) and numbers of nodes."""

    edges: Tensor
    x: Tensor
    rows: Rows
    mask: Tensor
    numbers: Tensor

    @property
    def weight(self) -> Tensor:
        return self.rows.edges["w"].squeeze(1)

    def sums(self, edges: Tensor, weight: Tensor | None = None) -> Results:
        """What these edges bring to each node."""
        return {"node sums": pyg.SimpleConv("sum")(self.x, edges, weight)}

    def data(self, **fields: Any) -> Data:
        """As a `Data` with positions, labels and masks."""
        pos, masks = self.rows.nodes["y"][:, :3], {"train_mask": self.mask, "val_mask": self.x[:, 1] < -1}
        return Data(self.x.clone(), self.edges, y=self.mask.long(), pos=pos, **masks, **fields)


Case = Callable[[Graph], Results]


def graph_of(graph: Any, rows: Rows) -> Graph:
    x = rows.nodes["x"]
    return Graph(edges_of(graph), x, rows, x[:, 0] > 0, (x[:, 0] > 0).nonzero().view(-1))


def run(graph: Any, rows: Rows, name: str, kind: str) -> Results:
    """One case, as a program of the harness."""
    cases = {**KINDS[kind][0], **KINDS[kind][1], **{name: case for name, (case, _) in KINDS[kind][2].items()}}
    return cases[name](graph_of(graph, rows))


def node(make: Callable[[], Any], *names: str) -> Case:
    """Some fields of the nodes after a transform."""

    def case(graph: Graph) -> Results:
        made = make()(graph.data())
        return {f"node {name}": made[name].double() for name in names or ("x",)}

    return case


def edge(make: Callable[[], Any]) -> Case:
    """The values of the edges after a transform."""
    return lambda graph: {"edge values": make()(graph.data(norm=graph.rows.nodes["y"][:, 3:])).edge_attr}


def sums(make: Callable[[], Any], weight: str = "edge_attr") -> Case:
    """What the edges bring to each node after a transform."""

    def case(graph: Graph) -> Results:
        made = make()(graph.data(**{weight: graph.weight}))
        return graph.sums(made.edge_index, made[weight])

    return case


UTILS_EXACT: dict[str, Case] = {
    "add_remaining_self_loops": lambda g: g.sums(*utils.add_remaining_self_loops(g.edges, g.weight, 2.0, len(g.x))),
    "add_self_loops": lambda g: g.sums(*utils.add_self_loops(g.edges, g.weight, 2.0, len(g.x))),
    "bipartite_subgraph of masks": lambda g: g.sums(utils.bipartite_subgraph((g.mask, g.mask), g.edges)[0]),
    "degree of edge_index[0]": lambda g: {"node degrees": utils.degree(g.edges[0], len(g.x))},
    "degree of edge_index[1]": lambda g: {"node degrees": utils.degree(g.edges[1], len(g.x))},
    "get_laplacian": lambda g: g.sums(*utils.get_laplacian(g.edges, g.weight, "sym", num_nodes=len(g.x))),
    "get_self_loop_attr": lambda g: {"node loops": utils.get_self_loop_attr(g.edges, g.weight, len(g.x))},
    "normalize_edge_index": lambda g: g.sums(*utils.normalize_edge_index(g.edges, len(g.x))),
    "normalized_cut": lambda g: {"edge cuts": utils.normalized_cut(g.edges, g.weight, len(g.x))},
    "remove_self_loops": lambda g: g.sums(*utils.remove_self_loops(g.edges, g.weight)),
    "scatter of edge_index[0]": lambda g: {"node sums": utils.scatter(g.weight, g.edges[0], 0, len(g.x))},
    "segregate_self_loops": lambda g: g.sums(utils.segregate_self_loops(g.edges)[0]),
    "softmax of edge_index[1]": lambda g: {"edge weights": utils.softmax(g.weight, g.edges[1], num_nodes=len(g.x))},
    "subgraph of a mask": lambda g: g.sums(utils.subgraph(g.mask, g.edges)[0]),
}

UTILS_REFUSED: dict[str, Case] = {
    "add_random_edge": lambda g: utils.add_random_edge(g.edges, 0.5, num_nodes=len(g.x)),
    "assortativity": lambda g: utils.assortativity(g.edges),
    "batched_negative_sampling": lambda g: utils.batched_negative_sampling(g.edges, torch.zeros(len(g.x)).long()),
    "bipartite_subgraph of numbers": lambda g: utils.bipartite_subgraph((g.numbers, g.numbers), g.edges),
    "coalesce": lambda g: utils.coalesce(g.edges, num_nodes=len(g.x)),
    "contains_isolated_nodes": lambda g: utils.contains_isolated_nodes(g.edges, len(g.x)),
    "contains_self_loops": lambda g: utils.contains_self_loops(g.edges),
    "dropout_edge of both ways": lambda g: utils.dropout_edge(g.edges, force_undirected=True),
    "get_ppr": lambda g: utils.get_ppr(g.edges, num_nodes=len(g.x)),
    **{
        f"homophily {method}": lambda g, method=method: utils.homophily(g.edges, g.mask.long(), method=method)
        for method in ("edge", "node", "edge_insensitive")
    },
    "is_undirected": lambda g: utils.is_undirected(g.edges, num_nodes=len(g.x)),
    "k_hop_subgraph": lambda g: utils.k_hop_subgraph(0, 2, g.edges, num_nodes=len(g.x)),
    "negative_sampling": lambda g: utils.negative_sampling(g.edges, len(g.x)),
    "remove_isolated_nodes": lambda g: utils.remove_isolated_nodes(g.edges, num_nodes=len(g.x)),
    "sort_edge_index": lambda g: utils.sort_edge_index(g.edges, num_nodes=len(g.x)),
    "structured_negative_sampling": lambda g: utils.structured_negative_sampling(g.edges, len(g.x)),
    "structured_negative_sampling_feasible": lambda g: utils.structured_negative_sampling_feasible(g.edges, len(g.x)),
    "subgraph of numbers": lambda g: utils.subgraph(g.numbers, g.edges, num_nodes=len(g.x)),
    "to_dense_adj": lambda g: utils.to_dense_adj(g.edges),
    "to_dgl": lambda g: utils.to_dgl(g.data()),
    "to_networkx": lambda g: utils.to_networkx(g.data()),
    "to_scipy_sparse_matrix": lambda g: utils.to_scipy_sparse_matrix(g.edges),
    "to_torch_coo_tensor": lambda g: utils.to_torch_coo_tensor(g.edges, size=len(g.x)),
    "to_torch_csc_tensor": lambda g: utils.to_torch_csc_tensor(g.edges, size=len(g.x)),
    "to_torch_csr_tensor": lambda g: utils.to_torch_csr_tensor(g.edges, size=len(g.x)),
    "to_torch_sparse_tensor": lambda g: utils.to_torch_sparse_tensor(g.edges, size=len(g.x)),
    "to_undirected": lambda g: utils.to_undirected(g.edges, num_nodes=len(g.x)),
    "total_influence": lambda g: utils.total_influence(pyg.GCN(6, 4, 2, 4).double(), g.data(), 2, num_samples=2),
    "train_test_split_edges": lambda g: utils.train_test_split_edges(g.data()),
    "trim_to_layer": lambda g: utils.trim_to_layer(1, [5, 5], [3, 3], g.x, g.edges),
    "unbatch_edge_index": lambda g: utils.unbatch_edge_index(g.edges, torch.zeros(len(g.x)).long()),
}

_DRAWS = "each worker draws for its own"
_ROWS = "numbers are those of this worker's rows"

UTILS_LOCAL: dict[str, tuple[Case, str]] = {
    "dropout_adj": (lambda g: g.sums(utils.dropout_adj(g.edges)[0]), _DRAWS),
    "dropout_edge": (lambda g: g.sums(utils.dropout_edge(g.edges)[0]), _DRAWS),
    "dropout_node": (lambda g: g.sums(utils.dropout_node(g.edges, num_nodes=len(g.x))[0]), _DRAWS),
}

UTILS_PACKAGES = ("dropout_path", "to_cugraph", "to_networkit", "to_rdmol", "to_smiles", "to_trimesh")
"""Not tried: these need packages that are not here, or data that has no edges."""

T = transforms

TRANSFORMS_EXACT: dict[str, Case] = {
    "AddRemainingSelfLoops": sums(lambda: T.AddRemainingSelfLoops("edge_weight"), "edge_weight"),
    "AddSelfLoops": sums(lambda: T.AddSelfLoops("edge_weight"), "edge_weight"),
    "Cartesian max_value": edge(lambda: T.Cartesian(max_value=2.0)),
    "Compose": sums(lambda: T.Compose([T.RemoveSelfLoops(), T.AddSelfLoops("edge_weight")]), "edge_weight"),
    "ComposeFilters": lambda g: {"same says": torch.tensor(float(T.ComposeFilters([lambda data: True])(g.data())))},
    "Constant": node(T.Constant),
    "Distance max_value": edge(lambda: T.Distance(max_value=2.0)),
    "GCNNorm": sums(T.GCNNorm, "edge_weight"),
    "LinearTransformation": node(lambda: T.LinearTransformation(torch.eye(3).double() * 2), "pos"),
    "LocalCartesian": edge(T.LocalCartesian),
    "NormalizeFeatures": node(lambda: T.NormalizeFeatures(["x", "pos"]), "x", "pos"),
    "OneHotDegree": node(lambda: T.OneHotDegree(50)),
    "PointPairFeatures": edge(T.PointPairFeatures),
    "Polar max_value": lambda g: {
        "edge values": T.Polar(max_value=2.0)(Data(edge_index=g.edges, pos=g.rows.nodes["y"][:, :2])).edge_attr
    },
    "RemoveSelfLoops": sums(lambda: T.RemoveSelfLoops("edge_weight"), "edge_weight"),
    "RemoveTrainingClasses": node(lambda: T.RemoveTrainingClasses([1]), "train_mask"),
    "Spherical not normalised": edge(lambda: T.Spherical(norm=False)),
    "TargetIndegree max_value": edge(lambda: T.TargetIndegree(max_value=2.0)),
    "ToDevice": node(lambda: T.ToDevice("cpu")),
}

TRANSFORMS_LOCAL: dict[str, tuple[Case, str]] = {
    "IndexToMask": (lambda g: node(T.IndexToMask, "train_mask")(g), _ROWS),
    "MaskToIndex": (lambda g: {"node index": T.MaskToIndex()(g.data()).train_index}, _ROWS),
    "RandomJitter": (node(lambda: T.RandomJitter(1.0), "pos"), _DRAWS),
}

TRANSFORMS_PACKAGES = ("AddGPSE", "AddMetaPaths", "AddRandomMetaPaths", "ToSLIC")
"""Not tried: these need packages or models that are not here, or several types of edges; or take images."""


def refused_transform(kind: type) -> Case:
    """What refuses it comes before its own code, so it needs no arguments."""
    transform = kind.__new__(kind)
    transform.norm, transform.max = True, None  # of those that scale
    return lambda g: transform(g.data())


TRANSFORMS_REFUSED: dict[str, Case] = {
    name: refused_transform(getattr(T, name))
    for name in sorted({*T.__all__} - {"BaseTransform", *TRANSFORMS_EXACT, *TRANSFORMS_LOCAL, *TRANSFORMS_PACKAGES})
}

KINDS = {
    "utils": (UTILS_EXACT, UTILS_REFUSED, UTILS_LOCAL),
    "transforms": (TRANSFORMS_EXACT, TRANSFORMS_REFUSED, TRANSFORMS_LOCAL),
}
