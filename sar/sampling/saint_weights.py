"""The weights of GraphSAINT: how likely nodes and edges are in a subgraph, computed or counted.

[Note: probabilities of subgraphs]
A subgraph of n independent draws has node v unless all miss it: p_v = 1 - (1 - Q_v)^n, where Q_v is the probability
that one draw brings v. It has the edge (u, v), as all edges between its nodes, with

    p_uv = 1 - (1 - Q_u)^n - (1 - Q_v)^n + (1 - Q_u - Q_v + J_uv)^n,

where J_uv is the probability that one draw brings both. Nodes drawn singly have J = 0; of drawn edges J_uv is the sum
over all that join u and v, in either direction; J_uu = Q_u. The terms nearly cancel for small Q, so this is computed as
p_u p_v + a^n expm1(n log1p((J - Q_u Q_v) / a)) with a = (1 - Q_u) (1 - Q_v).
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.core.graph.edges import InEdges
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.reverse import sum_at_sources
from sar.kernels.neighbor_sampling import ALL, derive_key, draw_in_edges
from sar.nn.rows import fetch_rows
from sar.sampling.neighbors import keep_sources
from sar.sampling.owner_requests import ask_everyone
from sar.sampling.worker_graph import WorkerGraph

KEY: Final = 0x5A1
"""Of the subgraphs that are counted: the same graph gets the same weights."""


class SaintWeights(NamedTuple):
    """Weights of this worker's nodes and edges; 0 for those that no subgraph has."""

    loss: Tensor  # (N_i,) float64: 1 / lambda_v
    aggregator: Tensor  # (E_i,) float64 by position: 1 / alpha_uv


def exact_weights(
    graph: GraphShardManager, local: WorkerGraph, found: InEdges, mode: str, draws: int, shares: Tensor
) -> SaintWeights:
    """From the probabilities: see [Note: probabilities of subgraphs]; by all workers together.

    Args:
        graph: the whole graph, of one edge type.
        local: the same, as it is sampled from.
        found: its in-edges.
        mode: "node" or "edge".
        draws: in a subgraph.
        shares: the probability that a draw is of each of this worker's nodes, or edges by position; float64.
    """
    rows = found.rows()
    loop = found.src == rows + local.node_ranges[local.part][0]
    if mode == "node":
        once, joint = shares, torch.zeros(len(rows), dtype=torch.float64)
    else:
        of_edges = torch.empty_like(shares)
        of_edges[found.edges] = shares
        once = sum_at_sources(graph, of_edges.to(graph.device)).cpu().index_add_(0, rows, shares.masked_fill(loop, 0))
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

    Args:
        group: the workers; inside its `guard()`.
        local: this worker's part of the graph.
        coverage: how often a node is drawn on average.
        draw: the nodes of the subgraph of a key.
    """
    group.agree(f"{local.signature}: counting subgraphs")
    (relation,) = local.relations
    of_nodes, of_edges = (torch.zeros(n, dtype=torch.int64) for n in (len(relation.indptr) - 1, len(relation.src)))

    def count(question: list[Tensor]) -> list[Tensor]:
        own, nodes = question
        rows = local.rows(relation.etype[2], own)
        offsets, picked = draw_in_edges(rows, own, relation.indptr, None, ALL, False, 0)
        of_nodes[rows] += 1
        of_edges[keep_sources(local, relation, offsets, picked, nodes)[1]] += 1
        return []

    rounds = number = 0
    while not number or number < rounds:
        nodes = draw(derive_key(KEY, group.rank, number))
        asked = local.sort_by_owner(nodes)
        questions = [[asked.of(worker), nodes] for worker in range(group.world_size)]
        ask_everyone(group, f"{local.signature}: counts", questions, count, [])
        if not number:
            size = sum(map(int, group.all_gather(torch.tensor(len(nodes)), "sizes of subgraphs")))
            rounds = math.ceil(coverage * local.num_nodes / max(size, 1))
        number += 1
    times = of_nodes.clamp(min=1).double()
    return SaintWeights(
        number * group.world_size / times, times.repeat_interleave(relation.indptr.diff()) / of_edges.clamp(min=1)
    )


def _of_pairs(group: Group, local: WorkerGraph, src: Tensor, rows: Tensor, shares: Tensor) -> Tensor:
    """For each edge the sum of the shares of all edges that join its ends, in either direction, (E_i,)."""
    first, bound = local.node_ranges[local.part][0], local.num_nodes
    pairs, place = (rows * bound + src).unique(return_inverse=True)
    there = shares.new_zeros(len(pairs) + 1).index_add_(0, place, shares)  # and 0 for pairs that are not there
    known = torch.cat([pairs, torch.tensor([bound * bound])])

    def back(question: list[Tensor]) -> list[Tensor]:
        destinations, sources = question
        wanted = (destinations - first) * bound + sources
        found = torch.searchsorted(known, wanted)
        return [torch.where(known[found] == wanted, there[found], 0)]

    asked = local.sort_by_owner(pairs % bound)
    nodes = first + pairs // bound
    questions = [[asked.of(worker), nodes[asked.positions_of(worker)]] for worker in range(group.world_size)]
    answers = ask_everyone(group, f"{local.signature}: pairs", questions, back, [FieldFormat(torch.float64)])
    both = there[:-1].index_add(0, asked.positions, torch.cat([sums for (sums,) in answers]))
    return both[place]


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, 0)
