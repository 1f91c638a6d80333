"""The pairs of nodes that a batch of seed edges joins, and others drawn at random to tell them from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.common_tuples import EID, CanonicalEtype
from sar.kernels.neighbor_sampling import Numbering
from sar.sampling.owner_requests import ask_everyone
from sar.sampling.seed_edges import DST, ID, NUMBER, PLACE, REVERSE, SRC, TYPE
from sar.sampling.worker_graph import WorkerGraph


@dataclass(frozen=True)
class PairSettings:
    """What is drawn for seed edges.

    exclude: leave the seeds, and their reverse edges where they have any, out of the sampled neighbourhoods.
    negatives: for every edge type, pairs to draw for a seed; None for no second graph.
    both_ends: of negative pairs draw the sources too, and as many pairs in all as `negatives`, which may be a fraction,
        makes of the seeds of a batch, rounded up.
    """

    exclude: bool
    negatives: list[float] | None
    both_ends: bool = False


class PairsOfType(NamedTuple):
    """Pairs of one type, by positions among the nodes of a batch."""

    etype: CanonicalEtype
    src: Tensor  # (S,) int64
    dst: Tensor  # (S,) int64
    features: dict[str, Tensor]  # (S, ...) each


class Pairs(NamedTuple):
    """The pairs of a batch, and the nodes that they join."""

    nodes: dict[str, Tensor]  # global IDs of every type, (N,) int64, as they come up
    positive: list[PairsOfType]  # the seeds, with `_ID` and their fields
    negative: list[PairsOfType] | None
    exclude: Tensor | None  # (X,) int64, IDs of edges
    numbers: list[Tensor]  # by type, (S,) int64: NUMBER of the seeds


def draw_pairs(group: Group, graph: WorkerGraph, seeds: Tensor, settings: PairSettings, key: int) -> Pairs:
    """The pairs of a batch, by all workers together.

    The negative pairs (u, v') of a seed (u, v) have any v' of v's type, equally likely, as of
    `dgl.dataloading.negative_sampler.Uniform`; or negative pairs (u', v') have any two nodes of the types.

    Args:
        group: the workers, which have agreed on the batch; inside its `guard()`.
        graph: this worker's part of the graph.
        seeds: (S, 7) int64: see [Note: seed edges].
        settings: what to draw.
        key: 63 bits that belong to this worker and batch.
    """
    generator = torch.Generator().manual_seed(key)
    by_type = [seeds[seeds[:, TYPE] == number] for number in range(len(graph.relations))]
    pairs = [
        PairsOfType(relation.etype, of_type[:, SRC].contiguous(), of_type[:, DST].contiguous(), fields)
        for relation, of_type, fields in zip(graph.relations, by_type, _edge_fields(group, graph, by_type), strict=True)
    ]
    num_types = len(pairs)
    if settings.negatives is not None:
        pairs += [
            _negative(graph, of_type, count, settings.both_ends, generator)
            for of_type, count in zip(pairs, settings.negatives, strict=True)
        ]
    numbering = {}
    for ntype in graph.node_types:
        most = sum(len(of_type.src) for of_type in pairs for end in (0, 2) if of_type.etype[end] == ntype)
        numbering[ntype] = Numbering(most, graph.num_nodes)
    pairs = [
        of_type._replace(
            src=numbering[of_type.etype[0]].add(of_type.src), dst=numbering[of_type.etype[2]].add(of_type.dst)
        )
        for of_type in pairs
    ]
    nodes = {ntype: numbers.nodes for ntype, numbers in numbering.items()}
    negative = pairs[num_types:] if settings.negatives is not None else None
    exclude = seeds[:, [ID, REVERSE]].flatten() if settings.exclude else None
    return Pairs(nodes, pairs[:num_types], negative, exclude, [of_type[:, NUMBER].contiguous() for of_type in by_type])


def _negative(
    graph: WorkerGraph, seeds: PairsOfType, count: float, both_ends: bool, generator: torch.Generator
) -> PairsOfType:
    """`count` pairs for each seed, all in global IDs."""
    total = math.ceil(len(seeds.src) * count)
    dst = _any_nodes(graph, seeds.etype[2], total, generator)
    src = _any_nodes(graph, seeds.etype[0], total, generator) if both_ends else seeds.src.repeat_interleave(int(count))
    return PairsOfType(seeds.etype, src, dst, {})


def _any_nodes(graph: WorkerGraph, ntype: str, count: int, generator: torch.Generator) -> Tensor:
    """Global IDs of nodes of a type, all equally likely, (count,) int64."""
    mine = graph.runs.types == graph.node_types.index(ntype)
    ends = torch.cat([graph.runs.starts[1:], torch.tensor([graph.num_nodes])])
    reached = (ends - graph.runs.starts)[mine].cumsum(0)
    drawn = torch.randint(int(reached[-1]) if count else 1, (count,), generator=generator)
    return drawn + (ends[mine] - reached)[torch.searchsorted(reached, drawn, right=True)]


def _edge_fields(group: Group, graph: WorkerGraph, by_type: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """The seeds' IDs and fields, which their owners have; for every edge type (S, ...) each."""
    fields = [{EID: of_type[:, ID].contiguous()} for of_type in by_type]
    numbers = [number for number, relation in enumerate(graph.relations) if relation.features]
    if not numbers:
        return fields
    asked = [graph.sort_by_owner(by_type[number][:, DST].contiguous()) for number in numbers]

    def look_up(places: Sequence[Tensor]) -> list[Tensor]:
        relations = [graph.relations[number] for number in numbers]
        return [
            feature[relation.rows[of_type]]
            for relation, of_type in zip(relations, places, strict=True)
            for feature in relation.features.values()
        ]

    questions = [
        [by_type[number][nodes.positions_of(worker), PLACE] for number, nodes in zip(numbers, asked, strict=True)]
        for worker in range(group.world_size)
    ]
    formats = [FieldFormat.of(table) for number in numbers for table in graph.relations[number].features.values()]
    by_owner = ask_everyone(group, f"{graph.signature}: seed edges", questions, look_up, formats)
    columns = map(torch.cat, zip(*by_owner, strict=True))
    for number, nodes in zip(numbers, asked, strict=True):
        order = nodes.positions.argsort()
        fields[number] |= {name: next(columns)[order] for name in graph.relations[number].features}
    return fields
