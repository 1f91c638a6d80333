"""GraphSAINT: subgraphs of nodes drawn at random by all workers together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.comm import session
from sar.comm.group import Group
from sar.core.graph.edges import InEdges
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.mfg import Seeds
from sar.errors import ConfigError
from sar.kernels.neighbor_sampling import derive_key, to_offsets
from sar.nn.rows import fetch_rows
from sar.sampling.batch_sampler import SeedIds
from sar.sampling.neighbors import SampledLayer
from sar.sampling.owner_requests import ID_FORMAT, ask_everyone
from sar.sampling.saint_weights import SaintWeights, exact_weights, presampled_weights
from sar.sampling.subgraphs import SubgraphSampler, induced_subgraph
from sar.sampling.worker_graph import WorkerGraph, check_homogeneous, with_edge_field

LOSS_WEIGHT = "loss_weight"
AGGREGATOR_WEIGHT = "aggregator_weight"


class OutEdges(NamedTuple):
    """The edges into this worker, by source."""

    nodes: Tensor  # (n + 1,) int64: global IDs of the sources, ascending, and one that no node has
    indptr: Tensor  # (n + 2,) int64
    dst: Tensor  # (E + 1,) int64: global IDs, and one more

    @classmethod
    def of(cls, found: InEdges, first: int, num_nodes: int) -> "OutEdges":
        """Of in-edges of the nodes from `first` on."""
        dst = first + found.rows()
        nodes, counts = found.src.unique(return_counts=True)
        nodes, counts = torch.cat([nodes, torch.tensor([num_nodes])]), torch.cat([counts, torch.tensor([0])])
        return cls(nodes, to_offsets(counts), torch.cat([dst[found.src.argsort(stable=True)], torch.tensor([-1])]))

    def step(self, at: Tensor, key: int) -> list[Tensor]:
        """How many edges nodes have to this worker, and the end of one of them, evenly drawn; (n,) int64 both."""
        place = torch.searchsorted(self.nodes, at)
        begin, end = self.indptr[place], self.indptr[place + 1]
        counts = torch.where(self.nodes[place] == at, end - begin, 0)
        drawn = begin + (torch.from_numpy(np.random.default_rng(key).random(len(at))) * counts).long()
        return [counts, self.dst[drawn]]


@dataclass(frozen=True)
class RandomNodes:
    """Draws the nodes of subgraphs; see `SamplingMethod`. A batch with any seed is one subgraph.

    Each draw chooses a worker by what it has, and that worker one of its own, so it is as one from the whole graph.

    mode: what is drawn, with replacement: "node", "edge" or, for roots, "walk".
    draws: how many.
    length: of the walks along out-edges.
    totals: (W,) float64, the sum of each worker's weights.
    sums: cumulative weights of this worker's nodes or edges, float64.
    out_edges: for walks.
    """

    mode: str
    draws: int
    length: int
    totals: Tensor
    sums: Tensor
    out_edges: OutEdges | None

    def draw(
        self, group: Group, graph: WorkerGraph, seeds: Mapping[str, Tensor], key: int, exclude: Tensor | None
    ) -> list[SampledLayer]:
        """One subgraph, empty without seeds."""
        (numbers,) = seeds.values()
        nodes = self.nodes(group, graph, self.draws if len(numbers) else 0, key)
        return induced_subgraph(group, graph, nodes, f"{graph.signature}, edges")

    def nodes(self, group: Group, graph: WorkerGraph, draws: int, key: int) -> Tensor:
        """The nodes of one subgraph, ascending global IDs; by all workers together."""
        random, workers = np.random.default_rng(key), range(group.world_size)
        total = float(self.totals.sum())
        shares = random.multinomial(draws, self.totals.numpy() / total) if total else [0] * len(workers)
        questions = [[torch.tensor([int(shares[p]), derive_key(key, 0, p)])] for p in workers]
        found = ask_everyone(
            group, f"{graph.signature}, draws", questions, lambda q: self._own(graph, q[0]), [ID_FORMAT]
        )
        visited = [torch.cat([nodes for (nodes,) in found])]
        for step in range(1, self.length + 1):
            questions = [[torch.tensor([derive_key(key, step, p)]), visited[-1]] for p in workers]
            call = f"{graph.signature}, step {step}"
            found = ask_everyone(group, call, questions, self._step, [ID_FORMAT, ID_FORMAT])
            counts, ends = (torch.stack(columns) for columns in zip(*found, strict=True))
            reached = counts.cumsum(0)
            wanted = torch.from_numpy(random.random(len(visited[-1]))) * reached[-1]
            alive = (reached[-1] > 0).nonzero().squeeze(1)
            worker = (reached <= wanted).sum(0)
            visited.append(ends[worker[alive], alive])
        distinct: Tensor = torch.cat(visited).unique()
        return distinct

    def _own(self, graph: WorkerGraph, question: Tensor) -> list[Tensor]:
        """So many draws from this worker's nodes or edges, as nodes."""
        count, key = question.tolist()
        if not count:
            return [torch.empty(0, dtype=torch.int64)]
        points = torch.from_numpy(np.random.default_rng(key).random(count)) * self.sums[-1]
        picked = torch.searchsorted(self.sums, points, right=True).clamp(max=len(self.sums) - 1)
        first = graph.node_ranges[graph.part][0]
        if self.mode != "edge":
            return [first + picked]
        (relation,) = graph.relations
        dst = first + torch.searchsorted(relation.indptr, picked, right=True) - 1
        return [torch.cat([relation.src[picked].long(), dst])]

    def _step(self, question: list[Tensor]) -> list[Tensor]:
        assert self.out_edges is not None
        return self.out_edges.step(question[1], int(question[0]))


class SAINTSampler(SubgraphSampler):
    """Subgraphs of nodes, edges or random walks drawn at random, with weights that undo how likely each part is.

    Zeng et al. 2020, "GraphSAINT: Graph Sampling Based Inductive Learning Method"; modes and budgets are those of
    `dgl.dataloading.SAINTSampler`. All draws are with replacement, from the whole graph:

    - "node": a budget of nodes, in proportion to their out-degrees, at least 1;
    - "edge": a budget of edges (u, v), in proportion to 1 / in-degree of v + 1 / out-degree of u, with both ends;
    - "walk": a budget (roots, length): the nodes on walks of so many steps along out-edges, from roots anywhere.

    Node field `loss_weight` is 1 / lambda_v, the inverse of the probability that v is in a subgraph: the sum of the
    losses, so weighted, is on average that over all nodes of the graph. Edge field `aggregator_weight` is 1 / alpha_uv,
    the probability of v over that of u and v together: the sum over in-edges, so weighted, is on average, where v is
    drawn, that over all of v's in-edges. Both are exact for "node" and "edge". For "walk" they are counted in
    subgraphs drawn beforehand, the same for the same graph; what none of them has counts as once.

    The seeds of a loader are any distinct numbers; each batch of them is one subgraph, as in DGL:
    `DataLoader(graph, torch.arange(100), sampler)` is 100 subgraphs on each worker. Batches and further arguments are
    as of `SubgraphSampler`. With `format="pyg"` the weights are `node_norm`, which is 1 / (lambda_v N) for N nodes in
    the graph, so that the sum is on average the mean over all nodes, and `edge_norm`.

    Args:
        mode: "node", "edge" or "walk".
        budget: number of nodes or edges; for "walk" a pair of numbers.
        coverage: for "walk": how often, on average, a node is in the subgraphs that are counted, 50 in the paper; 0
            for no weights.

    Raises:
        ConfigError: for arguments of another form. In use, GraphError: for graphs of several edge types.
    """

    def __init__(
        self,
        mode: str,
        budget: int | tuple[int, int],
        copy_edata: bool = True,
        input_node_features: Mapping[str, Tensor] | None = None,
        output_node_features: Mapping[str, Tensor] | None = None,
        output_device: torch.device | str | None = None,
        *,
        coverage: int = 50,
    ) -> None:
        super().__init__(copy_edata, input_node_features, output_node_features, output_device)
        if mode not in ("node", "edge", "walk"):
            raise ConfigError(f"mode is {mode!r}; expected 'node', 'edge' or 'walk'.")
        numbers = list(budget) if isinstance(budget, (tuple, list)) else [budget]
        if len(numbers) != (2 if mode == "walk" else 1) or any(type(n) is not int or n < 1 for n in numbers):
            expected = "a pair (roots, length)" if mode == "walk" else "a number"
            raise ConfigError(f"budget is {budget!r}; expected {expected} from 1 on for mode {mode!r}.")
        if coverage < 0:
            raise ConfigError(f"coverage is {coverage}; expected at least 0.")
        self.mode = mode
        self.budget = budget
        self.coverage = coverage
        self._draws, self._length = (*numbers, 0)[:2]

    def seed_ids(self, graph: GraphShardManager, seeds: Seeds, *, foreign: bool) -> SeedIds:
        """Any distinct numbers, which may be those of other workers."""
        return SeedIds(torch.as_tensor(seeds), None, foreign=False)

    def _plan(self, graph: GraphShardManager) -> tuple[WorkerGraph, RandomNodes]:
        check_homogeneous(graph, "SAINTSampler")
        settings = f"{self.mode} subgraphs of {self._draws}, {self._length}, coverage {self.coverage}"
        local, (found,), group = self._worker_graph(graph, settings), self.in_edges(graph), session.current_group()
        out_degrees, in_degrees = graph.out_degrees(), found.indptr.diff()
        weights = torch.ones(len(in_degrees), dtype=torch.float64)
        if self.mode == "node":
            weights = out_degrees.cpu().clamp(min=1).double()
        elif self.mode == "edge":
            of_sources = fetch_rows(graph, out_degrees, found.src).cpu().double()
            weights = in_degrees.double().reciprocal().repeat_interleave(in_degrees) + of_sources.reciprocal()
        totals = torch.stack(group.all_gather(weights.sum(), "weights of subgraphs")).cpu()
        first = local.node_ranges[local.part][0]
        out_edges = OutEdges.of(found, first, local.num_nodes) if self.mode == "walk" else None
        method = RandomNodes(self.mode, self._draws, self._length, totals, weights.cumsum(0), out_edges)
        if self.mode != "walk":
            given = exact_weights(graph, local, found, self.mode, self._draws, weights / totals.sum())
        elif self.coverage:
            given = presampled_weights(
                group, local, self.coverage, lambda key: method.nodes(group, local, self._draws, key)
            )
        else:
            return local, method
        return self._weighted(local, found, given), method

    def _data_fields(self, features: dict[str, Tensor], num_nodes: int) -> dict[str, Tensor]:
        fields = dict(features)
        if LOSS_WEIGHT in fields:
            fields["node_norm"] = fields.pop(LOSS_WEIGHT) / num_nodes
        return fields

    @staticmethod
    def _weighted(local: WorkerGraph, found: InEdges, weights: SaintWeights) -> WorkerGraph:
        """With the weights among the fields to copy."""
        (ntype,), (relation,), dtype = local.node_types, local.relations, torch.get_default_dtype()
        features = local.outputs.get(ntype, {}) | {LOSS_WEIGHT: weights.loss.to(dtype)}
        relation = with_edge_field(relation, found, AGGREGATOR_WEIGHT, weights.aggregator.to(dtype))
        return replace(local, outputs={ntype: features}, relations=[relation])
