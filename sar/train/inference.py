"""A trained model's outputs for some nodes of a partition directory, computed on their neighborhood alone.

[Note: closed neighborhoods] A model of K message passing steps needs the nodes up to K hops away, against the direction
of the edges, and all edges into those nearer than that. Layers also read degrees of the farthest nodes, and some raise
if a node has no in-edges. So the in-edges of the farthest are there too, but from stand-ins: made-up nodes, which have
edges from one another. Out-degrees and the numbers of nodes and edges are those of the whole directory.

[Note: two surroundings] A model may still use something that the neighborhood does not tell: the mean of all nodes,
sums over out-edges, row numbers, one hop more. So it runs twice: with few stand-ins, whose features are like those of
the nodes, and with many, whose features and degrees are others, and to which nodes have edges if they have edges that
leave the neighborhood; and with other row numbers. Outputs that differ depend on these, and are refused.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sar.adapters.dgl.graphs import construct_full_graph
from sar.comm.rows import BufferPool
from sar.comm.session import standing_in
from sar.comm.statistics import listeners
from sar.common_tuples import EID, ETYPE, GIVEN_ID, NTYPE, CanonicalEtype, PartitionData, ShardEdgesAndFeatures, StrPath
from sar.core.graph.graph import GraphShardManager
from sar.data.arrays import Array
from sar.data.checksums import check_sums
from sar.data.part_files import (
    DST,
    SRC,
    FeatureFiles,
    original_node_ids,
    read_part_graph,
    types_of,
)
from sar.data.partition_json import PartitionJson, graph_path, read_partition_json
from sar.errors import ConfigError, GraphError, PartitionError
from sar.id_slices import distinct, find_sorted
from sar.partition.inspect.inspection import largest_value
from sar.train.counted_graph import CountingGroup
from sar.train.graph_counts import INPUTS, LABELS, GraphInfo

_ROUND_OFF = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to the largest output; 1e-5 in other dtypes
_FEW, _MANY = 7, 8  # stand-ins of each node type in the two surroundings
_WHOLE = "evaluate on the whole graph, as docs/howto/infer.md says"


def infer(
    directory: StrPath,
    make_model: Callable[[GraphInfo], nn.Module],
    weights: StrPath,
    nodes: Array,
    *,
    ntype: str | None = None,
    hops: int | None = None,
    num_classes: int | None = None,
    check: int = 0,
) -> Array:
    """Compute a trained model's outputs for some nodes, on one worker, from no more than these depend on.

    Args:
        directory: a partition directory, or its JSON file; the graph may be another one than the model was trained on.
        make_model: makes the model, as for `sar plan`, anew for each run; the model is called as `model(graph, x)`,
            where x are the nodes' `feat` or `x`, (N, F), by node type if there are several.
        weights: a state dict, as `sar.save_model` writes it.
        nodes: (S,) the nodes, by their IDs in the input: 0 to N - 1, or those that `--ids map` has kept; integers, or
            strings, also of integers.
        ntype: their type; may be left out if there is one.
        hops: K: how far an output looks. None: as many hops as the model makes distributed calls, which is never too
            few, and too many if a layer makes several, as with several edge types.
        num_classes: for `make_model`; None: one more than the greatest `label`, else `y`, 0 without both.
        check: compare so many of the nodes, drawn at random, with outputs of the model on the whole graph, which has
            to fit into memory.

    Returns:
        (S, ...), in the order of `nodes`; bfloat16 as float32, because numpy lacks it.

    Raises:
        ConfigError: there is no such node or type, or the weights do not fit the model.
        GraphError: the outputs depend on more than K hops of in-edges, or the model raised an error on these.
        PartitionError: the directory is damaged, or has no input features.
    """
    spec = read_partition_json(directory)
    for part in range(spec.num_parts):
        check_sums(graph_path(spec, part).parent)
    kind, wanted = _find_nodes(spec, ntype, nodes)
    nothing = _read(spec, wanted[:0], 0)
    widths = {key.partition("/")[0]: x.shape[-1] for key, x in nothing.node_features.items()}
    if not widths:
        raise PartitionError(f"no node type has a feature {' or '.join(INPUTS)}, which models start from.")
    if num_classes is None:
        for name in reversed(LABELS):  # so that the first one there decides
            with suppress(PartitionError):  # without these labels
                num_classes = int(largest_value(spec.path, name)) + 1
    counts = dict(zip(spec.node_types, np.diff(spec.node_ranges).sum((0, 2)).tolist(), strict=True))
    info = GraphInfo(spec.node_types, nothing.etypes, counts, widths, num_classes or 0)
    load = partial(_load, make_model, info, weights)  # anew for each run: layers may keep something of a graph
    group = CountingGroup(0, 1)
    with torch.no_grad(), standing_in(group, BufferPool(group.device)):
        if hops is None:
            alone = _surround(nothing, _FEW)
            listeners.append(calls := _Calls())
            try:
                alone.outputs(load(), kind, wanted[:0])
            finally:
                listeners.remove(calls)
        near = _read(spec, wanted.unique(), len(calls) if hops is None else hops)
        few = partial(_surround, near, _FEW)
        out = few().outputs(load(), kind, wanted)
        others = [("with other surroundings", partial(_surround, near, _MANY, crowded=True), torch.arange(len(out)))]
        if check:
            every = _read(spec, torch.arange(sum(counts.values())), 0)
            others.append(("on the whole graph", partial(_surround, every, 0), torch.randperm(len(out))[:check]))
        for where, other, sample in others:  # see [Note: two surroundings]
            gaps = _gaps(out[sample], other().outputs(load(), kind, wanted[sample]))
            if gaps.any():
                worst = sample[gaps.argmax()]
                traces = (_trace(load(), make(), kind, wanted[worst].view(1)) for make in (few, other))
                raise GraphError(
                    f"{_first_to_differ(traces)}, or code before it, uses more of the graph than {near.hops} hops of "
                    f"in-edges: outputs of node {nodes[worst]} differ by {gaps.max():.2g} {where}. Pass more hops if "
                    f"layers look farther; if they use all nodes, out-edges, row or random numbers, {_WHOLE}."
                )
    return (out.float() if out.dtype == torch.bfloat16 else out).numpy()


def _load(make_model: Callable[[GraphInfo], nn.Module], info: GraphInfo, weights: StrPath) -> nn.Module:
    try:
        model = make_model(info)
    except Exception as error:  # of the user's function
        if info.num_classes:
            raise
        raise ConfigError(
            f"the model cannot be made ({type(error).__name__}: {error}), perhaps because the graph has no labels that "
            "tell how many classes there are. Say how many: --classes C (num_classes)."
        ) from error
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        model.to(_first_dtype(state.values())).eval().load_state_dict(state, assign=True)  # tensors in their own dtypes
    except Exception as error:  # torch.load raises many kinds for what is no state dict
        raise ConfigError(
            f"'{weights}' cannot be loaded into the model: {error}. Expected a state dict of the same model, as "
            "sar.save_model writes it, not a checkpoint; without labels also num_classes (--classes)."
        ) from error
    return model


def _first_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    return next((x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()), None)


class _Neighborhood(NamedTuple):
    """Nodes with the edges that their outputs depend on; see [Note: closed neighborhoods]."""

    spec: PartitionJson
    hops: int
    nodes: Tensor  # global IDs, ascending, (n,) int64
    types: Tensor  # (n,) int32
    edges: Tensor  # sources, destinations and IDs, all global, (3, E) int64
    etypes: list[CanonicalEtype]
    node_features: dict[str, Tensor]  # inputs of models, by `type/name`
    edge_features: dict[str, Tensor]  # all, likewise
    out_degrees: Tensor  # in the whole graph, by edge type, (n, number of edge types) int64


class _Surrounded(NamedTuple):
    """A neighborhood as a graph, with stand-ins for the rest."""

    near: _Neighborhood
    graph: GraphShardManager
    inputs: dict[str, Tensor]  # by node type
    stand_ins: list[int]  # of each node type; their rows come before those of the nodes
    turned: bool  # whether the nodes have descending IDs

    def rows(self, kind: int, nodes: Tensor) -> Tensor:
        """The rows of nodes of one type, given by global ID."""
        place, _ = find_sorted(known := self.near.nodes[self.near.types == kind], nodes)
        return self.stand_ins[kind] + (len(known) - 1 - place if self.turned else place)

    def outputs(self, model: nn.Module, kind: int, nodes: Tensor) -> Tensor:
        """The outputs of nodes of one type, given by global ID."""
        dtype = _first_dtype(model.state_dict().values())
        x = {ntype: x.to(dtype) if dtype and x.is_floating_point() else x for ntype, x in self.inputs.items()}
        try:
            out = model(self.graph, x if len(self.graph.ntypes) > 1 else next(iter(x.values())))
        except Exception as error:  # of the user's model
            raise GraphError(
                f"The model raised an error on {self.graph.num_nodes()} nodes in place of the whole graph "
                f"({type(error).__name__}: {error}). If it needs all nodes, {_WHOLE}."
            ) from error
        ntype = self.near.spec.node_types[kind]
        out, count = out.get(ntype) if isinstance(out, Mapping) else out, self.graph.num_nodes(ntype)
        if not isinstance(out, Tensor) or out.shape[:1] != (count,):
            raise GraphError(
                f"The model returns {getattr(out, 'shape', type(out))}; expected {count} rows, one for each node "
                f"of type {ntype!r}. For an output of the whole graph, {_WHOLE}."
            )
        return out[self.rows(kind, nodes)]


class _Calls(list[str]):
    """Distributed calls, as those who follow them are told."""

    begins = list.append

    def ends(self, call: str) -> None: ...


def _find_nodes(spec: PartitionJson, ntype: str | None, nodes: Array) -> tuple[int, Tensor]:
    """The type of nodes, and their global IDs, (S,)."""
    ntype = spec.node_types[0] if ntype is None and len(spec.node_types) == 1 else ntype
    if ntype not in spec.node_types:
        raise ConfigError(f"ntype is {ntype!r}; expected one of {spec.node_types}, the node types of {spec.path}.")
    kind = spec.node_types.index(ntype)
    nodes = np.char.encode(nodes, "utf-8") if nodes.dtype.kind == "U" else nodes
    wanted, back = np.unique(nodes, return_inverse=True)
    found = np.full(len(wanted), -1, np.int64)
    for part in range(spec.num_parts if len(wanted) else 0):
        features = FeatureFiles(spec, part, "nodes").features()
        given = [one.stored[:] for one in features if (one.type_id, one.name) == (kind, GIVEN_ID)]
        [ids] = given or [original_node_ids(spec, part, kind).numpy()]
        ids = ids.view(f"S{ids.shape[1]}")[:, 0] if ids.ndim == 2 else ids
        if nodes.dtype.kind == "S" and ids.dtype.kind in "iu":  # as text files have them
            with suppress(ValueError):
                nodes = nodes.astype(np.int64)
                wanted, back = np.unique(nodes, return_inverse=True)
        if nodes.ndim != 1 or (nodes.dtype.kind == "S") != (ids.dtype.kind == "S") or nodes.dtype.kind not in "iuS":
            raise ConfigError(
                f"the nodes are {nodes.dtype} {nodes.shape}; expected (S,) IDs like those there, {ids.dtype}."
            )
        place = np.searchsorted(wanted, ids).clip(max=len(wanted) - 1)
        rows = np.flatnonzero(wanted[place] == ids)
        found[place[rows]] = int(spec.node_ranges[part, kind, 0]) + rows
    if (missing := np.flatnonzero(found < 0)).size:
        one = wanted[missing[0]]
        shown = one.decode() if nodes.dtype.kind == "S" else one
        raise ConfigError(
            f"{len(missing)} of the nodes, such as {shown}, are not in {spec.path.parent}; expected IDs of its input."
        )
    return kind, torch.from_numpy(found[back])


def _read(spec: PartitionJson, nodes: Tensor, hops: int) -> _Neighborhood:
    """The neighborhood of some nodes, ascending global IDs."""
    etypes = spec.edge_types
    known = new = nodes
    edges: list[tuple[int, Tensor]] = []  # by part
    for hop in range(hops + 1):
        sources = [new[:0]]
        for part, some in _by_part(spec, new):
            into = _edges_of(spec, part)
            into = into[:, find_sorted(some, into[1])[1]]
            edges.append((part, into[:, into[2].argsort()]))
            sources.append(into[0])
        read = distinct(torch.cat(sources))
        new = read[~find_sorted(known, read)[1]] if hop < hops else new[:0]
        known = torch.cat([known, new]).sort().values
    out_degrees = torch.zeros(len(known) * len(etypes), dtype=torch.int64)
    for part in range(spec.num_parts if len(known) else 0):
        src, _, ids = _edges_of(spec, part)
        place, there = find_sorted(known, src)
        slot = place * len(etypes) + types_of(ids, spec.edge_ranges)
        out_degrees += torch.bincount(slot[there], minlength=len(out_degrees))
    of_nodes = _features(spec, "nodes", _by_part(spec, known), etypes)
    of_edges = _features(spec, "edges", [(part, found[2]) for part, found in edges], etypes)
    all_edges = torch.cat([torch.empty((3, 0), dtype=torch.int64), *(found for _, found in edges)], 1)
    types, degrees = types_of(known, spec.node_ranges), out_degrees.view(-1, len(etypes))
    return _Neighborhood(spec, hops, known, types, all_edges, etypes, of_nodes, of_edges, degrees)


def _by_part(spec: PartitionJson, nodes: Tensor) -> list[tuple[int, Tensor]]:
    """Ascending global IDs by the part that owns them, of parts that have some."""
    bounds = torch.searchsorted(nodes, torch.tensor([start for start, _ in spec.partition_ranges])).tolist()
    found = enumerate(nodes[start:end] for start, end in pairwise([*bounds, len(nodes)]))
    return [(part, some) for part, some in found if len(some)]


def _edges_of(spec: PartitionJson, part: int) -> Tensor:
    """The edges into a part's own nodes: sources, destinations and IDs, all global, (3, E)."""
    graph = read_part_graph(spec, part)
    inner = graph.is_inner[graph.edges[DST].long()]
    ends = (graph.node_id[graph.edges[end][inner].long()] for end in (SRC, DST))
    return torch.stack([*ends, graph.edges[EID][inner]])


def _features(
    spec: PartitionJson, what: Any, parts: Iterable[tuple[int, Tensor]], etypes: list[CanonicalEtype]
) -> dict[str, Tensor]:
    """Inputs of models, or all features of edges, by `type/name`: rows of ascending global IDs."""
    ranges = spec.node_ranges if what == "nodes" else spec.edge_ranges
    names = spec.node_types if what == "nodes" else [":".join(etype) for etype in etypes]
    rows: dict[str, list[Tensor]] = {}
    for part, ids in [(0, torch.empty(0, dtype=torch.int64)), *parts]:
        files = FeatureFiles(spec, part, what)
        kinds = types_of(ids, ranges)
        for one in [*files.features(), *(files.original_ids() if what == "edges" else [])]:
            if what == "edges" or one.name in INPUTS:
                own = ids[kinds == one.type_id] - int(ranges[part, one.type_id, 0])
                rows.setdefault(f"{names[one.type_id]}/{one.name}", []).append(one.take(own))
    return {key: torch.cat(found) for key, found in rows.items()}


def _surround(near: _Neighborhood, stand_ins: int, crowded: bool = False) -> _Surrounded:
    """A neighborhood with so many stand-ins of each node type; see [Note: two surroundings].

    If `crowded`, with one more for every four nodes, the first with more in-edges than any node; and nodes descend, so
    that even rows become odd.
    """
    node_types, random, n = near.spec.node_types, torch.Generator().manual_seed(stand_ins), len(near.nodes)
    own = torch.bincount(near.types, minlength=len(node_types)).tolist()
    counts = [stand_ins + crowded * (m // 4 + (stand_ins + m // 4 + m + _FEW) % 2) for m in own]
    *first, total = accumulate(counts, initial=0)

    def draw(kind: int, count: int) -> Tensor:
        return first[kind] + torch.randint(max(counts[kind], 1), (count,), generator=random)

    def turn(rows: Tensor) -> Tensor:
        return rows.flip(0) if crowded else rows

    inputs, ends, features = {}, [], {}
    for key, rows in near.node_features.items():
        ntype = key.partition("/")[0]
        inputs[ntype] = torch.cat([_made_up(rows, counts[node_types.index(ntype)], random, crowded), turn(rows)])
    row, of_type = turn(torch.arange(total, total + n)), types_of(near.edges[2], near.spec.edge_ranges)
    for number, (source, relation, target) in enumerate(near.etypes):
        u, v = node_types.index(source), node_types.index(target)
        src, dst, _ = near.edges[:, of_type == number]
        (src, there), (dst, _) = find_sorted(near.nodes, src), find_sorted(near.nodes, dst)
        sent = torch.bincount(src[there], minlength=n)
        leaving = torch.repeat_interleave(crowded * torch.minimum(near.out_degrees[:, number] - sent, sent + 1))
        busy = torch.zeros(crowded * (int(torch.bincount(dst, minlength=1).max()) + 1), dtype=torch.int64)
        into = first[v] + torch.cat([torch.arange(counts[v]), busy])
        src = torch.cat([torch.where(there, row[src], draw(u, len(src))), draw(u, len(into)), row[leaving]])
        ends.append(torch.stack([src, torch.cat([row[dst], into, draw(v, len(leaving))])]))
        for key, rows in near.edge_features.items():
            if key.startswith(f"{source}:{relation}:{target}/"):
                features[key] = torch.cat([rows, _made_up(rows, len(src) - len(rows), random, crowded)])
    features[ETYPE] = torch.repeat_interleave(torch.tensor([found.shape[1] for found in ends]))
    types = torch.cat([torch.repeat_interleave(torch.tensor(counts)), turn(near.types)])
    src, dst = torch.cat(ends, 1)
    shard = ShardEdgesAndFeatures((src, dst), features)
    data = PartitionData([shard], [(0, len(types))], {NTYPE: types}, node_types, near.etypes)
    surrounded = _Surrounded(near, construct_full_graph(data), inputs, counts, crowded)
    return surrounded._replace(graph=_with_true_counts(surrounded))


def _made_up(rows: Tensor, count: int, random: torch.Generator, beyond: bool) -> Tensor:
    """Rows for stand-ins: some of `rows`, or numbers of the same sign that are greater or less than these."""
    rows = rows if len(rows) else rows.new_full((1, *rows.shape[1:]), rows.is_floating_point())
    if not (beyond and rows.is_floating_point()):
        return rows[torch.randint(len(rows), (count,), generator=random)]
    low, high = rows.amin(0), rows.amax(0)
    size, coin = torch.rand((2, count, *rows.shape[1:]), generator=random)
    above = high + size * torch.where(high < 0, -high / 2, 3 * high + (high == 0))
    below = low - size * torch.where(low > 0, low / 2, -3 * low)
    return torch.where(coin < 0.5, above, below).to(rows.dtype)


def _with_true_counts(surrounded: _Surrounded) -> GraphShardManager:
    """The graph with out-degrees, and numbers of nodes and edges on all workers, as in the directory."""
    near, graph, _, stand_ins, turned = surrounded
    spec, old, relations = near.spec, graph._structure, []
    num_nodes, num_edges = (np.diff(ranges).sum((0, 2)).tolist() for ranges in (spec.node_ranges, spec.edge_ranges))
    for relation, count, column in zip(old.relations, num_edges, near.out_degrees.T, strict=True):
        known = column[near.types == (kind := spec.node_types.index(relation.etype[0]))]
        degrees = relation.out_degrees + turned * column.sum()  # those of stand-ins are others
        degrees[stand_ins[kind] :] = known.flip(0) if turned else known
        relations.append(replace(relation, out_degrees=degrees, num_edges_global=count))
    nodes = replace(old.src, counts_global=dict(zip(spec.node_types, num_nodes, strict=True)))
    return graph._with(structure=replace(old, src=nodes, dst=nodes, relations=relations), relations=relations)


def _gaps(out: Tensor, other: Tensor) -> Tensor:
    """How far apart two outputs of each node are, (S,); 0 if no farther than round-off."""
    if out.shape != other.shape or not out.numel():
        return torch.full((len(out),), 0.0 if out.shape == other.shape else torch.inf)
    a, b = (x.double().reshape(len(x), -1) for x in (out, other))
    gaps = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0).nan_to_num(nan=torch.inf).amax(1)
    return gaps.masked_fill(gaps <= _ROUND_OFF.get(out.dtype, 1e-5) * a.nan_to_num(0, 0, 0).abs().max(), 0)


def _first_to_differ(traces: Iterable[list[list[Any]]]) -> str:
    """The first module that returns something else though it is given the same."""
    for (name, *one), (_, *other) in zip(*traces, strict=False):
        given, returned = (a.shape == b.shape and not _gaps(a, b).any() for a, b in zip(one, other, strict=True))
        if len(one[0]) and given and not returned:
            return str(name)
    return "The model"


def _trace(model: nn.Module, surrounded: _Surrounded, kind: int, node: Tensor) -> list[list[Any]]:
    """The modules in the order in which they end, each with its arguments and results for a node and its in-edges."""
    graph, ntype, trace = surrounded.graph, surrounded.near.spec.node_types[kind], []
    row = surrounded.rows(kind, node)
    rows = {graph.num_nodes(ntype): row}  # by the length of a tensor that has them
    for relation in graph._structure.relations:
        if relation.etype[2] == ntype:
            indptr, edges = relation.in_edges
            rows[relation.num_edges] = edges[indptr[row] : indptr[row + 1]]

    def see(name: str, module: nn.Module, *values: Any) -> None:
        seen: list[Any] = [f"{type(module).__name__} {name}".strip()]
        for tensors in (values[:2], values[2]):
            plain = [x for x in tree_leaves(tensors) if type(x) is Tensor and x.dim() and len(x) in rows]
            seen.append(torch.cat([torch.empty(0), *(x[rows[len(x)]].flatten() for x in plain)]))
        trace.append(seen)

    for name, module in model.named_modules():
        if not name.endswith("aggr_module"):  # hooks there keep layers of PyTorch Geometric from going tile by tile
            module.register_forward_hook(partial(see, name), with_kwargs=True)
    surrounded.outputs(model, kind, node)
    return trace
