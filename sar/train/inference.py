"""What a trained model says of some nodes of a partition directory, computed on their neighbourhood alone.

[Note: closed neighborhoods] A model of K message passing steps needs the nodes up to K hops away, against the direction
of the edges, and all edges into those nearer than that. Layers also read degrees of the farthest nodes, and some raise
where a node has no in-edges. So the in-edges of the farthest are there too, but from a stand-in: a last node of each
type, with zeros for features, and an edge of each edge type from one to another. What is computed there reaches no node
that was asked for. Out-degrees are counted over the whole directory. So outputs are those of the whole graph, unless a
model asks for something else of all nodes, such as their mean.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sar.adapters.dgl.graphs import construct_full_graph
from sar.comm.rows import BufferPool
from sar.comm.session import group_of_processes, standing_in
from sar.comm.statistics import listeners
from sar.common_tuples import EID, ETYPE, GIVEN_ID, NTYPE, CanonicalEtype, PartitionData, ShardEdgesAndFeatures, StrPath
from sar.core.graph.graph import GraphShardManager
from sar.core.regroup import WorkerShare
from sar.errors import ConfigError, PartitionError
from sar.id_slices import distinct, find_sorted
from sar.partition.inspect.inspection import largest_value
from sar.partition.original_order import original_nodes
from sar.storage.arrays import Array
from sar.storage.checksums import verifying
from sar.storage.part_files import DST, SRC, FeatureFiles, PartFile, canonical_edge_types, check_node_ids, types_of
from sar.storage.partition_json import PartitionJson, graph_path, read_partition_json
from sar.train.graph_counts import FEATURE, LABEL, GraphInfo

_INPUTS = (FEATURE, "x")


def infer(
    directory: StrPath,
    make_model: Callable[[GraphInfo], nn.Module],
    weights: StrPath,
    nodes: Array,
    *,
    ntype: str | None = None,
    hops: int | None = None,
    num_classes: int | None = None,
    allow_outside: bool = False,
) -> Array:
    """Compute a trained model's outputs for some nodes, on one worker, from no more than these depend on.

    Args:
        directory: a partition directory, or its JSON file; the graph may be another one than the model was trained on.
        make_model: makes the model, as for `sar plan`; it is called as `model(graph, x)`, where x are the nodes' `feat`
            or `x`, (N, F), by node type where there are several.
        weights: a state dict, as `sar.save_model` writes it.
        nodes: (S,) the nodes, by their IDs in the input: 0 to N - 1, or those that `--ids map` has kept.
        ntype: their type; may be left out where there is one.
        hops: K: how far an output looks. None: as many hops as the model makes distributed calls, which is never too
            few, and too many where a layer makes several, as with several edge types.
        num_classes: for `make_model`; None: one more than the greatest `label`, 0 without labels.
        allow_outside: as in `load_dgl_partition_data`.

    Returns:
        (S, ...), in the order of `nodes`.

    Raises:
        ConfigError: there is no such node or type, or the weights do not fit the model.
        PartitionError: the directory is damaged, or has no input features.
    """
    spec = read_partition_json(directory, allow_outside=allow_outside)
    kind, wanted = _find_nodes(spec, ntype, nodes)
    stand_ins = _read(spec, wanted[:0], 0)
    widths = {kind_of: x.shape[-1] for kind_of, x in stand_ins.inputs.items()}
    if num_classes is None:
        with suppress(PartitionError):  # without labels
            num_classes = int(largest_value(spec.path, LABEL)) + 1
    counts = (spec.node_ranges[..., 1] - spec.node_ranges[..., 0]).sum(0).tolist()
    by_type = dict(zip(spec.node_types, counts, strict=True))
    model = make_model(GraphInfo(spec.node_types, stand_ins.data.edge_type_names, by_type, widths, num_classes or 0))
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        dtype = next((value.dtype for value in state.values() if value.is_floating_point()), torch.float32)
        model.to(dtype).eval().load_state_dict(state)
    except (OSError, pickle.UnpicklingError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"'{weights}' does not fit the model: {error} Expected a state dict of the same model, as sar.save_model "
            "writes it; num_classes (--classes) says how wide outputs are where there are no labels."
        ) from error
    group = group_of_processes(torch.distributed.HashStore(), 0, 1)
    with torch.no_grad(), standing_in(group, BufferPool(group.device)):
        if hops is None:
            graph = construct_full_graph(stand_ins.data)
            listeners.append(calls := _Calls())
            try:
                stand_ins.run(model, graph, dtype)
            finally:
                listeners.remove(calls)
        found = _read(spec, wanted.unique(), calls.count if hops is None else hops)
        out = found.run(model, _with_true_degrees(spec, construct_full_graph(found.data), found), dtype)
    group.close()
    out = out[spec.node_types[kind]] if isinstance(out, Mapping) else out
    of_type = found.nodes[found.types[: len(found.nodes)] == kind]
    return out[find_sorted(of_type, wanted)[0]].numpy()


class _Neighborhood(NamedTuple):
    """Nodes with all that their outputs depend on."""

    nodes: Tensor  # global IDs, ascending, (n,) int64; a stand-in of each type comes after them
    types: Tensor  # (n + T,)
    data: PartitionData  # of one worker

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What a model starts from, by node type."""
        found = self.data.node_features.items()
        return {key.partition("/")[0]: x for key, x in found if key != NTYPE}

    def run(self, model: nn.Module, graph: GraphShardManager, dtype: torch.dtype) -> Any:
        x = {ntype: x.to(dtype) if x.is_floating_point() else x for ntype, x in self.inputs.items()}
        if not x:
            raise PartitionError(f"no node type has a feature {' or '.join(_INPUTS)}, which models start from.")
        return model(graph, x if len(graph.ntypes) > 1 else next(iter(x.values())))


class _Calls:
    """Counts distributed calls."""

    count = 0

    def begins(self, call: str) -> None:
        self.count += 1

    def ends(self, call: str) -> None:
        pass


def _find_nodes(spec: PartitionJson, ntype: str | None, nodes: Array) -> tuple[int, Tensor]:
    """The type of nodes, and their global IDs, (S,)."""
    originals = original_nodes(spec, ntype)
    kind = 0 if ntype is None else spec.node_types.index(ntype)
    nodes = np.char.encode(nodes, "utf-8") if nodes.dtype.kind == "U" else nodes
    wanted, back = np.unique(nodes, return_inverse=True)
    found = np.full(len(wanted), -1, np.int64)
    for part, ends in enumerate(spec.partition_ranges if len(wanted) else ()):
        features = FeatureFiles(spec, part, "nodes").features()
        given = [one.stored[:] for one in features if (one.type_id, one.name) == (kind, GIVEN_ID)]
        [ids] = given or originals.of_worker(WorkerShare([part], *ends), [])
        ids = ids.view(f"S{ids.shape[1]}")[:, 0] if ids.ndim == 2 else ids
        if nodes.ndim != 1 or (nodes.dtype.kind == "S") != (ids.dtype.kind == "S") or nodes.dtype.kind not in "iuS":
            raise ConfigError(
                f"the nodes are {nodes.dtype} {nodes.shape}; expected (S,) IDs like those there, {ids.dtype}."
            )
        place = np.searchsorted(wanted, ids).clip(max=len(wanted) - 1)
        rows = np.flatnonzero(wanted[place] == ids)
        found[place[rows]] = int(spec.node_ranges[part, kind, 0]) + rows
    if (missing := np.flatnonzero(found < 0)).size:
        raise ConfigError(
            f"{len(missing)} of the nodes, such as {wanted[missing[0]]}, are not in {spec.path.parent}; expected IDs "
            "of its input."
        )
    return kind, torch.from_numpy(found[back])


def _read(spec: PartitionJson, nodes: Tensor, hops: int) -> _Neighborhood:
    """The neighbourhood of some nodes, ascending global IDs; see [Note: closed neighborhoods]."""
    etypes = canonical_edge_types(spec, PartFile(graph_path(spec, 0)).read(), 0)
    known = new = nodes
    edges: list[tuple[int, Tensor]] = []  # by part
    for hop in range(hops + 1):
        into = [(part, _edges_into(spec, part, some)) for part, some in _by_part(spec, new)]
        edges += into
        sources = distinct(torch.cat([new[:0], *(found[0] for _, found in into)]))
        new = sources[~find_sorted(known, sources)[1]] if hop < hops else new[:0]
        known = torch.cat([known, new]).sort().values
    src, dst, ids = torch.cat([torch.empty((3, 0), dtype=torch.int64), *(found for _, found in edges)], 1)
    kinds, every = types_of(ids, spec.edge_ranges).long(), torch.arange(len(etypes))
    number = {ntype: len(known) + i for i, ntype in enumerate(spec.node_types)}
    ends = torch.tensor([[number[etype[0]], number[etype[2]]] for etype in etypes]).T  # stand-ins
    place, there = find_sorted(known, src)
    src = torch.cat([torch.where(there, place, ends[0, kinds]), ends[0]])
    dst = torch.cat([find_sorted(known, dst)[0], ends[1]])
    types = torch.cat([types_of(known, spec.node_ranges).long(), torch.arange(len(number))])
    of_nodes = _features(spec, "nodes", _by_part(spec, known), etypes)
    of_edges = _features(spec, "edges", [(part, found[2]) for part, found in edges], etypes)
    if len(etypes) == 1:
        of_edges = {key.rpartition("/")[2]: rows for key, rows in of_edges.items()}
    shard = ShardEdgesAndFeatures((src, dst), {**of_edges, ETYPE: torch.cat([kinds, every])})
    ranges = [(0, len(types))]
    return _Neighborhood(
        known, types, PartitionData([shard], ranges, {NTYPE: types, **of_nodes}, spec.node_types, etypes)
    )


def _by_part(spec: PartitionJson, nodes: Tensor) -> list[tuple[int, Tensor]]:
    """Ascending global IDs by the part that owns them, of parts that have some."""
    bounds = torch.searchsorted(nodes, torch.tensor([start for start, _ in spec.partition_ranges])).tolist()
    found = enumerate(nodes[start:end] for start, end in pairwise([*bounds, len(nodes)]))
    return [(part, some) for part, some in found if len(some)]


def _edges_of(spec: PartitionJson, part: int) -> Tensor:
    """The edges into a part's own nodes: sources, destinations and IDs, all global, (3, E)."""
    with verifying(graph_path(spec, part).parent):
        graph = PartFile(graph_path(spec, part)).read()
    check_node_ids(spec, part, graph)
    inner = graph.is_inner[graph.edges[DST].long()]
    ends = (graph.node_id[graph.edges[end][inner].long()] for end in (SRC, DST))
    return torch.stack([*ends, graph.edges[EID][inner]])


def _edges_into(spec: PartitionJson, part: int, nodes: Tensor) -> Tensor:
    """Those into some of them, ascending global IDs; sorted by edge ID."""
    edges = _edges_of(spec, part)
    edges = edges[:, find_sorted(nodes, edges[1])[1]]
    return edges[:, edges[2].argsort()]


def _features(
    spec: PartitionJson, what: Any, parts: Iterable[tuple[int, Tensor]], etypes: list[CanonicalEtype]
) -> dict[str, Tensor]:
    """What models start from, or all of edges, by `type/name`: rows of ascending global IDs, and 0 for stand-ins."""
    ranges = spec.node_ranges if what == "nodes" else spec.edge_ranges
    names = spec.node_types if what == "nodes" else [":".join(etype) for etype in etypes]
    rows: dict[str, list[Tensor]] = {}
    nothing = torch.empty(0, dtype=torch.int64)
    stand_ins: dict[str, Tensor] = {}
    for part, ids in [(0, nothing), *parts]:
        files = FeatureFiles(spec, part, what, etypes)
        kinds = types_of(ids, ranges)
        with verifying(graph_path(spec, part).parent):
            for one in [*files.features(), *(files.original_ids() if what == "edges" else [])]:
                if what == "edges" or one.name in _INPUTS:
                    own = ids[kinds == one.type_id] - int(ranges[part, one.type_id, 0])
                    found, key = one.take(own), f"{names[one.type_id]}/{one.name}"
                    rows.setdefault(key, []).append(found)
                    stand_ins[key] = found.new_zeros((1, *found.shape[1:]))
    return {key: torch.cat([*found, stand_ins[key]]) for key, found in rows.items()}


def _with_true_degrees(spec: PartitionJson, graph: GraphShardManager, found: _Neighborhood) -> GraphShardManager:
    """The graph with the out-degrees that nodes have in the whole directory."""
    count = len(found.data.edge_type_names)
    degrees = torch.zeros(len(found.types) * count, dtype=torch.int64)
    for part in range(spec.num_parts):
        src, _, ids = _edges_of(spec, part)
        place, there = find_sorted(found.nodes, src)
        degrees += torch.bincount((place * count + types_of(ids, spec.edge_ranges))[there], minlength=len(degrees))
    relations = [
        replace(relation, out_degrees=column[found.types == spec.node_types.index(relation.etype[0])])
        for relation, column in zip(graph._structure.relations, degrees.view(-1, count).T, strict=True)
    ]
    return graph._with(structure=replace(graph._structure, relations=relations), relations=relations)
