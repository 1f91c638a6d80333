"""GraphSAINT: subgraphs of nodes drawn at random by all workers together, and the weights that undo it.

[Note: probabilities of subgraphs]
A subgraph of n independent draws has node v unless all miss it: p_v = 1 - (1 - Q_v)^n, where Q_v is the probability
that one draw brings v. It has the edge (u, v), as all edges between its nodes, with

    p_uv = 1 - (1 - Q_u)^n - (1 - Q_v)^n + (1 - Q_u - Q_v + J_uv)^n,

where J_uv is the probability that one draw brings both. Nodes drawn singly have J = 0; of drawn edges J_uv is the sum
over all that join u and v, in either direction; J_uu = Q_u. The terms nearly cancel for small Q, so this is computed as
p_u p_v + a^n expm1(n log1p((J - Q_u Q_v) / a)) with a = (1 - Q_u) (1 - Q_v).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sar.comm import session
from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.core.graph.edges import InEdges
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.message_passing import sum_at_sources
from sar.errors import ConfigError
from sar.id_slices import find_sorted, to_offsets
from sar.nn.rows import fetch_rows
from sar.sampling.batch import Batch, Draw
from sar.sampling.draws import ALL, derive_key, draw_in_edges
from sar.sampling.neighbors import SampledLayer, keep_sources
from sar.sampling.owner_requests import ID_FORMAT, NodesByOwner, look_up, send_requests
from sar.sampling.sampler import LabelShifts
from sar.sampling.seeds import check_seeds
from sar.sampling.subgraphs import SubgraphSampler, check_homogeneous, induced_subgraph
from sar.sampling.worker_graph import WorkerGraph

LOSS_WEIGHT = "loss_weight"
AGGREGATOR_WEIGHT = "aggregator_weight"
COUNTING_KEY: Final = 0x5A1  # of the subgraphs that are counted: the same graph gets the same weights


Step = Callable[[list[Tensor]], list[Tensor]]


def step_along(found: InEdges, first: int, num_nodes: int) -> Step:
    """A function that takes a step of random walks along the edges into this worker, whose first node is `first`.

    It is given a key and nodes, (n,) int64, and returns how many edges these have to this worker, and the end of one of
    them, evenly drawn.
    """
    # The edges by source; the sources end with one that no node is, and the ends with one that is never drawn.
    nodes, counts = found.src.unique(return_counts=True)
    nodes, indptr = pad(nodes, (0, 1), value=num_nodes), to_offsets(pad(counts, (0, 1)))
    ends = pad((first + found.rows())[found.src.argsort(stable=True)], (0, 1), value=-1)

    def step(request: list[Tensor]) -> list[Tensor]:
        key, at = request
        place = torch.searchsorted(nodes, at)
        begin, end = indptr[place], indptr[place + 1]
        counts = torch.where(nodes[place] == at, end - begin, 0)
        drawn = begin + (torch.from_numpy(np.random.default_rng(int(key)).random(len(at))) * counts).long()
        return [counts, ends[drawn]]

    return step


@dataclass(frozen=True)
class RandomNodes:
    """Draws the nodes of subgraphs by all workers together.

    Each draw chooses a worker by its share, and that worker one of its own, as if drawn from the whole graph.
    """

    draws: int  # how many, with replacement: of nodes, of edges, or of roots of walks
    edges: bool  # whether edges are drawn, of which both ends are taken
    length: int  # of walks along out-edges
    totals: Tensor  # (W,) float64, the sum of each worker's weights
    sums: Tensor  # cumulative weights of this worker's nodes or edges, float64
    step: Step | None  # of walks

    def nodes(self, group: Group, graph: WorkerGraph, draws: int, key: int) -> Tensor:
        """The nodes of one subgraph, ascending global IDs; by all workers together."""
        random, workers = np.random.default_rng(key), range(group.world_size)
        total = float(self.totals.sum())
        shares = random.multinomial(draws, self.totals.numpy() / total) if total else [0] * len(workers)
        requests = [[torch.tensor([int(shares[p]), derive_key(key, 0, p)], device="cpu")] for p in workers]
        call = f"{graph.signature}, draws"
        found = send_requests(group, call, requests, lambda request: self._own(graph, request[0]), [ID_FORMAT])()
        visited = [torch.cat([nodes for (nodes,) in found])]
        for step in range(1, self.length + 1):
            assert self.step is not None
            requests = [[torch.tensor([derive_key(key, step, p)], device="cpu"), visited[-1]] for p in workers]
            call = f"{graph.signature}, step {step}"
            found = send_requests(group, call, requests, self.step, [ID_FORMAT, ID_FORMAT])()
            counts, ends = (torch.stack(columns) for columns in zip(*found, strict=True))
            reached = counts.cumsum(0)
            wanted = torch.from_numpy(random.random(len(visited[-1]))) * reached[-1]
            alive = (reached[-1] > 0).nonzero().squeeze(1)
            worker = (reached <= wanted).sum(0)
            visited.append(ends[worker[alive], alive])
        distinct: Tensor = torch.cat(visited).unique()
        return distinct

    def _own(self, graph: WorkerGraph, count_and_key: Tensor) -> list[Tensor]:
        """So many draws from this worker's nodes or edges, as nodes."""
        count, key = count_and_key.tolist()
        if not count:
            return [torch.empty(0, dtype=torch.int64, device="cpu")]
        points = torch.from_numpy(np.random.default_rng(key).random(count)) * self.sums[-1]
        picked = torch.searchsorted(self.sums, points, right=True).clamp(max=len(self.sums) - 1)
        first = graph.node_ranges[graph.part][0]
        if not self.edges:
            return [first + picked]
        (relation,) = graph.relations
        dst = first + torch.searchsorted(relation.indptr, picked, right=True) - 1
        return [torch.cat([relation.src[picked].long(), dst])]


class SaintWeights(NamedTuple):
    """Weights of this worker's nodes and edges; 0 for those that no subgraph has."""

    loss: Tensor  # (N_i,) float64: 1 / lambda_v
    aggregator: Tensor  # (E_i,) float64 by position: 1 / alpha_uv


class SAINTSampler(SubgraphSampler):
    """Subgraphs of nodes, edges or random walks drawn at random, with weights that undo how likely each part is.

    Zeng et al. 2020, "GraphSAINT: Graph Sampling Based Inductive Learning Method"; modes and budgets are those of
    `dgl.dataloading.SAINTSampler`. All draws are with replacement, from the whole graph:

    - "node": a budget of nodes, in proportion to their out-degrees, at least 1;
    - "edge": a budget of edges (u, v), in proportion to 1 / in-degree of v + 1 / out-degree of u, with both ends;
    - "walk": a budget (roots, length): the nodes on walks of so many steps along out-edges, from roots anywhere.

    Node feature `loss_weight` is 1 / lambda_v, the inverse of the probability that v is in a subgraph: the sum of the
    losses, so weighted, is on average that over all nodes of the graph. Edge feature `aggregator_weight` is
    1 / alpha_uv, the probability of v over that of u and v together: the sum over in-edges, so weighted, is on average,
    if v is drawn, that over all of v's in-edges. Both are exact for "node" and "edge". For "walk" they are counted in
    subgraphs drawn beforehand, the same for the same graph; nodes and edges of none of them count once.

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

    def find_seeds(
        self, graph: GraphShardManager, local: WorkerGraph, seeds: Any, *, foreign: bool
    ) -> tuple[Tensor, LabelShifts]:
        """Any distinct numbers, which may be those of other workers."""
        return check_seeds(torch.as_tensor(seeds, device="cpu"), None), {}

    def _plan(self, graph: GraphShardManager) -> tuple[WorkerGraph, Draw]:
        check_homogeneous(graph, "SAINTSampler")
        settings = f"{self.mode} subgraphs of {self._draws}, {self._length}, coverage {self.coverage}"
        local, (found,), group = self._worker_graph(graph, settings), self.in_edges(graph), session.current_group()
        out_degrees, in_degrees = graph.out_degrees(), found.indptr.diff()
        weights = torch.ones(len(in_degrees), dtype=torch.float64, device="cpu")
        if self.mode == "node":
            weights = out_degrees.cpu().clamp(min=1).double()
        elif self.mode == "edge":
            of_sources = fetch_rows(graph, out_degrees, found.src).cpu().double()
            weights = in_degrees.double().reciprocal().repeat_interleave(in_degrees) + of_sources.reciprocal()
        totals = torch.stack(group.all_gather(weights.sum(), "weights of subgraphs")).cpu()
        first = local.node_ranges[local.part][0]
        step = step_along(found, first, local.num_nodes) if self.mode == "walk" else None
        edges, sums = self.mode == "edge", weights.cumsum(0)
        random_nodes = RandomNodes(self._draws, edges, self._length, totals, sums, step)

        def draw(group: Group, local: WorkerGraph, seeds: Tensor, key: int) -> tuple[list[SampledLayer], None]:
            """One subgraph, empty without seeds."""
            nodes = random_nodes.nodes(group, local, random_nodes.draws if len(seeds) else 0, key)
            return induced_subgraph(group, local, nodes, f"{local.signature}, edges")

        if self.mode != "walk":
            given = exact_weights(graph, local, found, self.mode, self._draws, weights / totals.sum())
        elif self.coverage:
            nodes_of_key = partial(random_nodes.nodes, group, local, self._draws)
            given = presampled_weights(group, local, self.coverage, nodes_of_key)
        else:
            return local, draw
        (ntype,), (relation,), dtype = local.node_types, local.relations, torch.get_default_dtype()
        features = local.outputs.get(ntype, {}) | {LOSS_WEIGHT: given.loss.to(dtype)}
        fields = relation.features | {AGGREGATOR_WEIGHT: _as_field(found, given.aggregator.to(dtype))}
        relation = replace(relation, rows=found.edges, features=fields)
        return replace(local, outputs={ntype: features}, relations=[relation]), draw

    def to_data(self, batch: Batch, shifts: LabelShifts) -> Any:
        """As of `SubgraphSampler`, with the weights of nodes as `node_norm`."""
        data = super().to_data(batch, shifts)
        if LOSS_WEIGHT in data:
            data.node_norm = data[LOSS_WEIGHT] / batch.num_nodes
            del data[LOSS_WEIGHT]
        return data


def exact_weights(
    graph: GraphShardManager, local: WorkerGraph, found: InEdges, mode: str, draws: int, shares: Tensor
) -> SaintWeights:
    """From the probabilities: see [Note: probabilities of subgraphs]; by all workers together.

    `shares` are those that a draw is of each of this worker's nodes, or in mode "edge" of its edges by position.
    """
    rows = found.rows()
    loop = found.src == rows + local.node_ranges[local.part][0]
    if mode == "node":
        once, joint = shares, torch.zeros(len(rows), dtype=torch.float64, device="cpu")
    else:
        once = sum_at_sources(graph.call_context(), _as_field(found, shares).to(graph.device)).cpu()
        once.index_add_(0, rows, shares.masked_fill(loop, 0))
        joint = _of_pairs(session.current_group(), local, found.src, rows, shares)
    at_source, at_destination = fetch_rows(graph, once.to(graph.device), found.src).cpu(), once[rows]
    joint = torch.where(loop, at_destination, joint)
    drawn = -torch.expm1(draws * torch.log1p(-once))
    both = both_drawn(at_source, at_destination, joint, draws)
    return SaintWeights(_ratio(torch.ones_like(drawn), drawn), _ratio(drawn[rows], both))


def both_drawn(u: Tensor, v: Tensor, joint: Tensor, draws: int) -> Tensor:
    """p_uv of Q_u, Q_v and J_uv, float64 all: see [Note: probabilities of subgraphs]."""
    missed = (1 - u) * (1 - v)
    excess = ((joint - u * v) / missed).clamp(min=-1)
    correction = missed**draws * torch.expm1(draws * torch.log1p(excess))
    product = torch.expm1(draws * torch.log1p(-u)) * torch.expm1(draws * torch.log1p(-v))
    return product + torch.where(missed > 0, correction, 0)


def presampled_weights(group: Group, local: WorkerGraph, coverage: int, draw: Callable[[int], Tensor]) -> SaintWeights:
    """From counts C in N subgraphs: N / C_v and C_v / C_uv, section 3.2 of the paper; by all workers together.

    `coverage` is how often a node is drawn on average; `draw` gives the nodes of the subgraph of a key.
    """
    group.agree(f"{local.signature}: counting subgraphs")
    (relation,) = local.relations
    of_nodes, of_edges = (
        torch.zeros(n, dtype=torch.int64, device="cpu") for n in (len(relation.indptr) - 1, len(relation.src))
    )

    def count(request: list[Tensor]) -> list[Tensor]:
        own, nodes = request
        rows = local.rows(relation.etype[2], own)
        offsets, picked = draw_in_edges(rows, own, relation.indptr, None, ALL, False, 0)
        of_nodes[rows] += 1
        of_edges[keep_sources(local, relation, offsets, picked, nodes)[1]] += 1
        return []

    rounds = number = 0
    while not number or number < rounds:
        nodes = draw(derive_key(COUNTING_KEY, group.rank, number))
        asked = NodesByOwner.sort(nodes, local.node_ranges)
        requests = [[of_owner, nodes] for of_owner in asked.nodes]
        send_requests(group, f"{local.signature}: counts", requests, count, [])()
        if not number:
            size = sum(group.gather_numbers(len(nodes), "sizes of subgraphs"))
            rounds = math.ceil(coverage * local.num_nodes / max(size, 1))
        number += 1
    times = of_nodes.clamp(min=1).double()
    of_destinations = times.repeat_interleave(relation.indptr.diff())
    return SaintWeights(number * group.world_size / times, of_destinations / of_edges.clamp(min=1))


def _as_field(found: InEdges, values: Tensor) -> Tensor:
    """Values of edges, (E,) by position, in the order of `edata`."""
    field = torch.empty_like(values)
    field[found.edges] = values
    return field


def _of_pairs(group: Group, local: WorkerGraph, src: Tensor, rows: Tensor, shares: Tensor) -> Tensor:
    """For each edge the sum of the shares of all edges that join its ends, in either direction, (E_i,)."""
    first, bound = local.node_ranges[local.part][0], local.num_nodes
    pairs, place = (rows * bound + src).unique(return_inverse=True)
    there = shares.new_zeros(len(pairs)).index_add_(0, place, shares)

    def back(request: list[Tensor]) -> list[Tensor]:
        destinations, sources = request
        found, known = find_sorted(pairs, (destinations - first) * bound + sources)
        sums = shares.new_zeros(len(found))
        sums[known] = there[found[known]]
        return [sums]

    columns = [pairs % bound, first + pairs // bound]  # the ends of an edge back
    asked, formats = NodesByOwner.sort(columns[0], local.node_ranges), [FieldFormat(torch.float64)]
    (sums,) = look_up(group, f"{local.signature}: pairs", asked, columns, back, formats)
    return (there + sums)[place]


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, 0)
