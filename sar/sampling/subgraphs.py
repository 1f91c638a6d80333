"""Batches that are subgraphs: induced by nodes of any workers, and by clusters of nodes (Cluster-GCN)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.graphs import make_local_graph, make_subgraph
from sar.comm import session
from sar.comm.group import Group
from sar.core.graph.edges import expand_runs
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, GraphError
from sar.sampling.batch import Batch, Draw
from sar.sampling.draws import ALL
from sar.sampling.neighbors import SampledEdges, SampledLayer, sample_layer
from sar.sampling.owner_requests import ID_FORMAT, send_requests
from sar.sampling.sampler import GraphSampler, LabelShifts
from sar.sampling.seed_batches import seed_parts
from sar.sampling.seeds import check_seeds
from sar.sampling.worker_graph import WorkerGraph


def induced_subgraph(group: Group, graph: WorkerGraph, nodes: Tensor, call: str) -> tuple[list[SampledLayer], None]:
    """One layer whose sources and destinations are these nodes, with all edges of the graph, of one type, between them.

    Owners of destinations have the edges, so each hears of all nodes, and sends those edges only that join two of them.
    The nodes are distinct and of any workers; the rest is as of `sample_layer`.
    """
    (ntype,) = graph.node_types
    return [sample_layer(group, graph, {ntype: nodes}, 0, [ALL], call, among=nodes)], None


def check_homogeneous(graph: GraphShardManager, sampler: str) -> None:
    """Raise `GraphError` if a graph has more types than the sampler is defined for."""
    if len(graph._structure.dst.ids) > 1 or len(graph.canonical_etypes) > 1:
        raise GraphError(
            f"{sampler} is for graphs of one node and one edge type; this one is of {[*graph._structure.dst.ids]} and "
            f"{graph.canonical_etypes}. DistNeighborSampler takes several."
        )


class SubgraphSampler(GraphSampler):
    """A sampler of which each batch is a `DGLGraph` of nodes of any workers, and all edges between these.

    Nodes are in the order of their global IDs, `dgl.NID`; `dgl.EID` are the graph's edge IDs. Arguments are as of
    `DistNeighborSampler`; both kinds of features go to the subgraph's nodes. With `format="pyg"` a batch is a `Data`
    with `n_id` and `e_id`.
    """

    def to_graphs(self, batch: Batch) -> Any:
        """A sampled batch as a graph of DGL, or of sar off the CPU, on the output device."""
        nodes, edges, features = _parts_of(batch)
        device = torch.device(self.output_device or "cpu")
        if device.type == "cpu":
            return make_subgraph(nodes, edges.indptr, edges.src, features, edges.features)
        ends = {edges.etype: (edges.indptr, edges.src, edges.features)}
        subgraph = make_local_graph({edges.etype[2]: nodes}, None, ends, device)
        subgraph.ndata.update({name: rows.to(device) for name, rows in features.items()})
        return subgraph

    def to_data(self, batch: Batch, shifts: LabelShifts) -> Any:
        """A sampled batch as a `Data` of PyTorch Geometric, on the output device."""
        from sar.adapters.pyg.graph import LayerEdges
        from sar.adapters.pyg.graph import make_subgraph as make_data

        nodes, edges, features = _parts_of(batch)
        data = make_data(nodes, LayerEdges(edges.src, edges.dst, edges.features), features)
        return data if self.output_device is None else data.to(self.output_device)


def _parts_of(batch: Batch) -> tuple[Tensor, SampledEdges, dict[str, Tensor]]:
    """Nodes, edges and features of the nodes."""
    (layer,) = batch.layers
    ((ntype, nodes),), (edges,) = layer.nodes.items(), layer.edges
    return nodes, edges, batch.inputs.get(ntype, {}) | batch.outputs.get(ntype, {})


class ClusterGCNSampler(SubgraphSampler):
    """Subgraphs of clusters of nodes: batches are several clusters, with all edges between their nodes.

    Chiang et al. 2019, "Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph Convolutional Networks";
    as `dgl.dataloading.ClusterGCNSampler`. METIS divides each worker's partition, or `clusters` says which nodes belong
    together. The seeds of a loader are numbers of clusters, of which each worker has its share in `cluster_ids`:
    `DataLoader(graph, sampler.cluster_ids, sampler, batch_size=20, shuffle=True)`.

    Made by all workers together. Batches and further arguments are as of `SubgraphSampler`.

    Args:
        graph: the whole graph, of one edge type.
        k: clusters of each worker, numbered rank * k + 0 to k - 1; with `clusters`, of the whole graph.
        clusters: the cluster of each of this worker's nodes, (N_i,) integer from 0 to k - 1, which may have nodes on
            several workers; it is dealt to the one that has most of them. Default: METIS finds them.

    Raises:
        GraphError: for graphs of several edge types, or message flow graphs.
        ConfigError: for arguments of another form.
    """

    def __init__(
        self,
        graph: GraphShardManager,
        k: int,
        clusters: Tensor | None = None,
        copy_edata: bool = True,
        input_node_features: Mapping[str, Tensor] | None = None,
        output_node_features: Mapping[str, Tensor] | None = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        with session.current_group().guard() as group:
            super().__init__(copy_edata, input_node_features, output_node_features, output_device)
            check_homogeneous(graph, "ClusterGCNSampler")
            if type(k) is not int or k < 1:
                raise ConfigError(f"k is {k!r}; expected a number of clusters from 1 on.")
            group.agree(f"ClusterGCNSampler of {k} clusters, given {clusters is not None}")
            self._graph, self._nodes = graph._structure, graph.node_ids().cpu()
            self._count = k if clusters is not None else k * group.world_size
            if clusters is None:
                self._numbers = group.rank * k + self._metis(graph, k)
                self.cluster_ids = group.rank * k + torch.arange(k, device="cpu")
                return
            numbers, count = torch.as_tensor(clusters, device="cpu"), graph.num_nodes()
            if numbers.shape != (count,) or numbers.is_floating_point() or numbers.dtype == torch.bool:
                raise ConfigError(
                    f"clusters has shape {tuple(numbers.shape)} and {numbers.dtype}; expected an integer for each of "
                    f"this worker's {count} nodes."
                )
            if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < k:
                raise ConfigError(
                    f"clusters has numbers from {int(numbers.min())} to {int(numbers.max())}; expected 0 to k - 1 = "
                    f"{k - 1}."
                )
            self._numbers = numbers.long().clone()  # the user may write to them
            sizes = torch.stack(group.all_gather(torch.bincount(self._numbers, minlength=k), "sizes of clusters"))
            self.cluster_ids = (sizes.argmax(0) == group.rank).nonzero().squeeze(1)

    def find_seeds(
        self, graph: GraphShardManager, local: WorkerGraph, seeds: Any, *, foreign: bool
    ) -> tuple[Tensor, LabelShifts]:
        """Numbers of clusters, of this worker or others."""
        return check_seeds(torch.as_tensor(seeds, device="cpu"), [(0, self._count)], foreign=True), {}

    def _plan(self, graph: GraphShardManager) -> tuple[WorkerGraph, Draw]:
        if graph._structure is not self._graph:
            raise ConfigError("The ClusterGCNSampler was made for another graph; make one for this graph.")
        order = self._numbers.argsort(stable=True)
        numbers, nodes = self._numbers[order], self._nodes[order]

        def nodes_of(request: list[Tensor]) -> list[Tensor]:
            begin, end = (torch.searchsorted(numbers, request[0], right=right) for right in (False, True))
            return [nodes[expand_runs(begin, end)[0]]]

        def draw(group: Group, local: WorkerGraph, seeds: Tensor, key: int) -> tuple[list[SampledLayer], None]:
            call = f"{local.signature}, clusters"
            found = send_requests(group, call, [[seeds]] * group.world_size, nodes_of, [ID_FORMAT])()
            return induced_subgraph(group, local, torch.cat([of_owner for (of_owner,) in found]).sort().values, call)

        return self._worker_graph(graph, f"subgraphs of {self._count} clusters"), draw

    def _metis(self, graph: GraphShardManager, k: int) -> Tensor:
        """The part of each of this worker's nodes, (N_i,) int64: METIS on the edges between them."""
        (found,) = self.in_edges(graph)
        count, first = len(self._nodes), int(self._nodes[0]) if len(self._nodes) else 0
        dst, src = found.rows(), found.src - first
        own = (src >= 0) & (src < count)
        if 1 < k < count:
            parts = seed_parts(src[own], dst[own], torch.ones(count, dtype=torch.bool, device="cpu"), k)
            if parts is not None:
                return parts
        return torch.arange(count, device="cpu") * k // max(count, 1)
