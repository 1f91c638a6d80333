"""Node features of a batch: own rows copied, remote ones fetched from all owners in one packed message each."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.collectives import exchange_buffers
from sar.comm.group import Group
from sar.kernels.neighbor_sampling import copy_rows
from sar.sampling import buffers
from sar.sampling.feature_cache import FeatureCache, choose_hot_nodes
from sar.sampling.hops import sort_by_owner
from sar.sampling.local_graph import Features, LocalGraph
from sar.sampling.packing import Form, pack, unpack

_NOTHING = torch.empty(0, dtype=torch.uint8)


class Fetched(NamedTuple):
    """Features of a batch.

    inputs, outputs: of the nodes asked for, by type and name.
    hits: remote input nodes whose features were in the cache.
    misses: remote input nodes whose features were fetched.
    """

    inputs: Features
    outputs: Features
    hits: int
    misses: int


def fill_cache(group: Group, graph: LocalGraph, nbytes: int) -> FeatureCache:
    """A cache of `nbytes` bytes for this worker's hot nodes; called by all workers together."""
    nodes = choose_hot_nodes(graph, nbytes)
    none = dict.fromkeys(graph.outputs, torch.empty(0, dtype=torch.int64))
    words = f"{graph.signature}: filling the cache"
    group.agree(words)
    fetched = fetch_features(group, graph, nodes, none, None, words)
    return FeatureCache(nodes, fetched.inputs)


class _Section(NamedTuple):
    """Rows of one node type to fetch: where they come from, where they go."""

    ntype: str
    tables: dict[str, Tensor]
    out: dict[str, Tensor]
    nodes: list[Tensor]  # by owner: global IDs
    places: list[Tensor]  # by owner: rows of `out`


def fetch_features(
    group: Group,
    graph: LocalGraph,
    input_nodes: Mapping[str, Tensor],
    output_nodes: Mapping[str, Tensor],
    cache: FeatureCache | None,
    words: str,
) -> Fetched:
    """The features `graph.inputs` of the input nodes and `graph.outputs` of the output nodes, from their owners.

    Args:
        group: to talk to the other workers, which have agreed on this; inside its `guard()`.
        graph: this worker's part of the graph.
        input_nodes, output_nodes: global IDs of every type, (n,) int64 each.
        cache: of input features.
        words: what the workers are doing, for errors.
    """
    sections, hits = [], 0
    for ntype, tables in graph.inputs.items():
        section, found = _section(graph, ntype, tables, input_nodes[ntype], cache)
        sections.append(section)
        hits += found
    misses = sum(len(nodes) for s in sections for p, nodes in enumerate(s.nodes) if p != graph.rank)
    sections += [
        _section(graph, ntype, tables, output_nodes[ntype], None)[0] for ntype, tables in graph.outputs.items()
    ]
    if sections:
        _exchange(group, graph, sections, words)
    inputs = {section.ntype: section.out for section in sections[: len(graph.inputs)]}
    outputs = {section.ntype: section.out for section in sections[len(graph.inputs) :]}
    return Fetched(inputs, outputs, hits, misses)


def _section(
    graph: LocalGraph, ntype: str, tables: dict[str, Tensor], nodes: Tensor, cache: FeatureCache | None
) -> tuple[_Section, int]:
    """A section, with the rows in it that are on this worker, and how many of them are from the cache."""
    out = {name: buffers.empty((len(nodes), *table.shape[1:]), table.dtype) for name, table in tables.items()}
    asked = sort_by_owner(graph, nodes)
    places = torch.arange(len(nodes)) if asked.order is None else asked.order
    bounds = list(pairwise(asked.begin))
    section = _Section(ntype, tables, out, *([x[b:e] for b, e in bounds] for x in (asked.nodes, places)))
    rows = graph.rows(ntype, section.nodes[graph.rank])
    for name, table in tables.items():
        copy_rows(table, rows, out[name], section.places[graph.rank])
    return section, _take_cached(graph, section, cache) if cache is not None else 0


def _take_cached(graph: LocalGraph, section: _Section, cache: FeatureCache) -> int:
    """Copy what the cache has, and leave the rest to be fetched."""
    hits = 0
    for p in range(len(graph.node_ranges)):
        if p == graph.rank:
            continue
        found = cache.find(section.ntype, section.nodes[p])
        known = found >= 0
        for name, table in cache.features.get(section.ntype, {}).items():
            copy_rows(table, found[known], section.out[name], section.places[p][known])
        section.nodes[p], section.places[p] = section.nodes[p][~known], section.places[p][~known]
        hits += int(known.sum())
    return hits


def _exchange(group: Group, graph: LocalGraph, sections: list[_Section], words: str) -> None:
    """Fill in the remote rows: one message with all sections' nodes to each owner, and one with all rows back."""
    everyone, rank = range(group.world_size), group.rank
    requests = [pack([s.nodes[p] for s in sections]) if p != rank else _NOTHING for p in everyone]
    arrived = exchange_buffers(group, f"{words}: nodes with features", requests)
    forms = [(s, name, Form.of(table)) for s in sections for name, table in s.tables.items()]
    answers = []
    for p in everyone:
        if p == rank:
            answers.append(_NOTHING)
            continue
        wanted = unpack(arrived[p], [Form(torch.int64)] * len(sections))
        rows = {id(s): graph.rows(s.ntype, nodes) for s, nodes in zip(sections, wanted, strict=True)}
        answer, begin = buffers.empty([sum(f.nbytes(len(rows[id(s)])) for s, _, f in forms)], torch.uint8), 0
        for section, name, form in forms:
            index = rows[id(section)]
            copy_rows(section.tables[name], index, form.view(answer, begin, len(index)), None)
            begin += form.nbytes(len(index))
        answers.append(answer)
    sizes = [sum(form.nbytes(len(s.nodes[p])) for s, _, form in forms) if p != rank else 0 for p in everyone]
    room = [buffers.empty([size], torch.uint8) for size in sizes]
    returned = exchange_buffers(group, f"{words}: features", answers, room)
    for p in everyone:
        begin = 0
        for section, name, form in forms if p != rank else []:
            count = len(section.nodes[p])
            copy_rows(form.view(returned[p], begin, count), None, section.out[name], section.places[p])
            begin += form.nbytes(count)
