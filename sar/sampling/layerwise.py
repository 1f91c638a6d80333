"""Layer-wise sampling (LADIES): one set of nodes for all destinations of a layer, within a budget.

[Note: probabilities of layers]
The destinations S of a layer read the rows P_v of a normalised adjacency matrix. Source u has the importance
q_u = sum of P_vu^2 over v in S, which owners of destinations can add up: they send sums by source, not edges. Of n
sources with q > 0 the budget b are drawn without replacement, u with the probability pi_u = min(1, c q_u), where c
makes the sum of all pi_u equal to b; all are taken where n <= b. Systematic draws from a random order (Madow 1949, "On
the theory of systematic sampling, II") have exactly these probabilities, so with weights P_vu / pi_u the sum over
drawn edges has the expectation sum of P_vu h_u over all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError
from sar.kernels.neighbor_sampling import ALL, derive_key, draw_in_edges
from sar.sampling.batch_sampler import BatchSampler
from sar.sampling.neighbors import Draws, SampledLayer, sample_layer
from sar.sampling.owner_requests import ID_FORMAT, ask_everyone
from sar.sampling.worker_graph import WorkerGraph, check_homogeneous, with_edge_field

WEIGHTS = "edge_weights"
"""The edge field of P_vu / pi_u, named as by `dgl.dataloading.LaborSampler`."""


@dataclass(frozen=True)
class LayerBudgets:
    """Draws nodes for whole layers: see [Note: probabilities of layers] and `SamplingMethod`.

    budgets: nodes to draw for each layer, input layer first.
    """

    budgets: list[int]

    def draw(
        self, group: Group, graph: WorkerGraph, seeds: Mapping[str, Tensor], key: int, exclude: Tensor | None
    ) -> list[SampledLayer]:
        """The layers of these seeds, distinct global IDs."""
        (ntype,), destinations = graph.node_types, seeds
        layers: list[SampledLayer] = []
        for number in reversed(range(len(self.budgets))):
            call = f"{graph.signature}, layer {number}"
            candidates, importance = _candidates(group, graph, destinations[ntype], call)
            drawn, probability = draw_systematically(importance, self.budgets[number], derive_key(key, number))
            chosen = candidates[drawn]
            layer = sample_layer(group, graph, destinations, Draws([ALL], False, 0, exclude, chosen), call)
            (edges,) = layer.edges
            rows = torch.searchsorted(chosen, layer.nodes[ntype][edges.src])
            scaled = edges.features[WEIGHTS] / probability[rows].to(edges.features[WEIGHTS].dtype)
            layer = layer._replace(edges=[edges._replace(features=edges.features | {WEIGHTS: scaled})])
            destinations = layer.nodes
            layers.insert(0, layer)
        return layers


class LadiesSampler(BatchSampler):
    """Samples a budget of nodes for each layer, by their importance for all destinations together.

    Zou et al. 2019, "Layer-Dependent Importance Sampling for Training Deep and Large Graph Convolutional Networks".
    The importance of a node is the squared norm of its column in the destinations' rows of the normalised adjacency
    P; a layer's blocks have the edges from drawn nodes, with P_vu / probability_u in the field `edge_weights`:
    `update_all(u_mul_e("h", "edge_weights"), sum)` is P h, on average. As many nodes as the budget are drawn, or all
    in-neighbours where there are no more. Destinations come first among the sources, drawn or not.

    Other edge fields, IDs and the devices are as of `DistNeighborSampler`, and so are the arguments not listed here.

    Args:
        nodes_per_layer: for each layer, input layer first, the nodes to draw, at least 1.
        weight: edge field with P, (E,) or (E, 1), at least 0. Default: 1 / in-degree, the mean over in-edges.

    Raises:
        ConfigError: for arguments of another form. In use, GraphError: for graphs of several edge types.
    """

    def __init__(
        self,
        nodes_per_layer: Sequence[int],
        weight: str | None = None,
        copy_edata: bool = True,
        input_node_features: Mapping[str, Tensor] | None = None,
        output_node_features: Mapping[str, Tensor] | None = None,
        output_device: torch.device | str | None = None,
        *,
        feature_cache_bytes: int = 0,
    ) -> None:
        whole = isinstance(nodes_per_layer, Sequence) and all(type(n) is int and n > 0 for n in nodes_per_layer)
        if not whole or not nodes_per_layer:
            raise ConfigError(
                f"nodes_per_layer is {nodes_per_layer!r}; expected a list with a number from 1 on for each layer, such "
                "as [512, 512]."
            )
        super().__init__(copy_edata, input_node_features, output_node_features, output_device, feature_cache_bytes)
        self.nodes_per_layer = list(nodes_per_layer)
        self.weight = weight

    def _plan(self, graph: GraphShardManager) -> tuple[WorkerGraph, LayerBudgets]:
        check_homogeneous(graph, "LadiesSampler")
        local = self._worker_graph(graph, f"layer-wise sampling of {self.nodes_per_layer}", self.weight)
        (found,), (relation,) = self.in_edges(graph), local.relations
        weights = relation.weights
        if weights is None:
            degrees = found.indptr.diff()
            weights = degrees.clamp(min=1).to(torch.get_default_dtype()).reciprocal().repeat_interleave(degrees)
        relation = with_edge_field(replace(relation, weights=None), found, WEIGHTS, weights)
        return replace(local, relations=[relation]), LayerBudgets(self.nodes_per_layer)


def _candidates(group: Group, graph: WorkerGraph, nodes: Tensor, call: str) -> tuple[Tensor, Tensor]:
    """The sources of the nodes' in-edges that have any importance: global IDs, ascending, and importances, float64."""
    (relation,), asked = graph.relations, graph.sort_by_owner(nodes)

    def answer(question: Sequence[Tensor]) -> list[Tensor]:
        (own,) = question
        _, picked = draw_in_edges(graph.rows(relation.etype[2], own), own, relation.indptr, None, ALL, False, 0)
        values = relation.features[WEIGHTS][relation.rows[picked]].double()
        return [*_sums_by_node(relation.src[picked].long(), values * values)]

    questions = [[asked.of(worker)] for worker in range(group.world_size)]
    formats = [ID_FORMAT, FieldFormat(torch.float64)]
    answers = ask_everyone(group, f"{call}: importances", questions, answer, formats)
    candidates, importance = _sums_by_node(*(torch.cat(pieces) for pieces in zip(*answers, strict=True)))
    return candidates[importance > 0], importance[importance > 0]


def _sums_by_node(nodes: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    distinct, place = nodes.unique(return_inverse=True)
    return distinct, values.new_zeros(len(distinct)).index_add_(0, place, values)


def draw_systematically(importance: Tensor, count: int, key: int) -> tuple[Tensor, Tensor]:
    """Draw without replacement: see [Note: probabilities of layers].

    Args:
        importance: (n,) float64, above 0.
        count: how many to draw, at least 1.
        key: 63 bits; equal keys give equal draws.

    Returns:
        The drawn, min(n, count) ascending positions, int64; and the probability that each had, float64.
    """
    if len(importance) <= count:
        return torch.arange(len(importance)), torch.ones_like(importance)
    by_size, order = importance.sort(descending=True, stable=True)
    rest = by_size.flip(0).cumsum(0).flip(0)[:count]  # from the i-th largest on
    left = count - torch.arange(count)
    # The largest are certain, one after the other, as long as their share of what is left of the budget exceeds 1.
    certain = int((left * by_size[:count] > rest).long().cumprod(0).sum())
    probability = (importance * (int(left[certain]) / rest[certain])).clamp(max=1)
    probability[order[:certain]] = 1
    random = np.random.default_rng(key)
    others = order[certain:][torch.from_numpy(random.permutation(len(order) - certain))]
    sums = probability[others].cumsum(0)
    sums *= left[certain] / sums[-1]
    points = torch.arange(int(left[certain])) + random.random()
    drawn = others[torch.searchsorted(sums, points, right=True).clamp(max=len(others) - 1)]
    drawn = torch.cat([order[:certain], drawn]).sort().values
    return drawn, probability[drawn]
