"""The distributed graph, a drop-in replacement for a `DGLGraph` in layers."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sar.comm.tiles import Settings
from sar.common_tuples import AnyEtype, CanonicalEtype
from sar.core.collective import CallContext, uncompiled
from sar.core.graph.edges import change_self_loops
from sar.core.graph.frames import Frame, Frames
from sar.core.graph.queries import ALL, GraphQueries
from sar.core.passing.batches import EdgeFields, NodeFunction, apply_nodes
from sar.core.passing.messages import compute_on_edges, is_python, send_and_reduce
from sar.core.relation import Relation, Structure
from sar.errors import GraphError
from sar.tensors.lasting import lasting

Self = TypeVar("Self", bound="GraphShardManager")

CROSS_REDUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0).values,
    "min": lambda stacked: stacked.min(0).values,
    "stack": lambda stacked: stacked.transpose(0, 1),
}


class GraphShardManager(GraphQueries):
    """A graph that spans all workers, with this worker's nodes and in-edges. It replaces a `DGLGraph` in layers.

    `update_all` and `apply_edges` fetch rows of other partitions one tile at a time, and again in the backward
    (Mostafa 2022, "Sequential Aggregation and Rematerialization"). They are collective: all workers make the same
    calls in the same order. Nodes are in partition order, and edges are sorted by source partition, destination and
    edge ID.

    `construct_full_graph` creates it.
    """

    one_shot = False

    # -- message passing

    @uncompiled
    def update_all(
        self, message_func: Any, reduce_func: Any, apply_node_func: NodeFunction | None = None, etype: AnyEtype = None
    ) -> None:
        """Send messages along all edges, reduce them at their destinations, and set the result in `dstdata`.

        Args:
            message_func: a message function of `dgl.function`, or a Python function of an `EdgeBatch` that returns a
                dictionary of messages, (E_batch, ...) each. A Python function runs on one tile of edges at a time, and
                again in the backward; it must not keep state.
            reduce_func: sum, mean, max or min of `dgl.function`, or a Python function of a `NodeBatch` that returns a
                dictionary of new features; a Python function holds the messages of all edges in memory. Nodes without
                messages get 0. As in DGL, max and min ignore NaN and replace infinite results by 0. If messages are
                equal, the last in edge order gets the gradient.
            apply_node_func: a Python function of a `NodeBatch` of all destinations. It reads the reduced values, before
                infinities are replaced, and its results are set instead. As in DGL, infinities are replaced by 0 only
                in the first of its results.
            etype: edge type; optional if there is only one.

        Raises:
            FieldError: an unknown feature or edge type.
            GraphError: unsupported functions or operands.
            CommunicationError: another worker failed or made a different call.
        """
        with self._structure.group.guard():
            context = self.call_context(etype)
            frame, fill = self._frames.dst[context.relation.etype[2]], apply_node_func is None
            results = send_and_reduce(context, self._edge_fields(context), message_func, reduce_func, fill=fill)
            if apply_node_func is not None:
                results = apply_nodes(apply_node_func, results, frame, context.relation.etype[2])
                for first in [*results][:1]:
                    results[first] = fill_infinities(results[first], reduce_func)
            frame.update(results)

    @uncompiled
    def multi_update_all(
        self,
        etype_dict: Mapping[str | CanonicalEtype, tuple[Any, ...]],
        cross_reducer: Any,
        apply_node_func: NodeFunction | None = None,
    ) -> None:
        """Call `update_all` for several edge types and combine the results of each destination type.

        Raises the errors of `update_all`. As in DGL, infinities are replaced by 0 after relations are combined, and
        only if the reducer of the last edge type is max or min.

        Args:
            etype_dict: (message function, reduce function[, apply function]) by edge type.
            cross_reducer: sum, mean, max, min, stack, or a function of a list of tensors.
            apply_node_func: called once per destination type, after its results have been set. Its own results are
                also set.
        """
        with self._structure.group.guard():
            by_etype: dict[CanonicalEtype, dict[str, Tensor]] = {}
            for etype, (message_func, reduce_func, *apply_func) in etype_dict.items():
                context = self.call_context(etype)
                results = send_and_reduce(context, self._edge_fields(context), message_func, reduce_func, fill=False)
                _, _, ntype = context.relation.etype
                if apply_func and apply_func[0] is not None:
                    results = apply_nodes(apply_func[0], results, self._frames.dst[ntype], ntype)
                by_etype[context.relation.etype] = results
            ordered = (
                [etype for etype in self._relations if etype in by_etype]
                if cross_reducer == "stack"
                else list(by_etype)
            )
            for ntype in dict.fromkeys(etype[2] for etype in by_etype):
                results = reduce_across([by_etype[etype] for etype in ordered if etype[2] == ntype], cross_reducer)
                frame = self._frames.dst[ntype]  # `reduce_func` is that of the last edge type, as in DGL
                frame.update({name: fill_infinities(column, reduce_func) for name, column in results.items()})
                if apply_node_func is not None:
                    frame.update(apply_nodes(apply_node_func, {}, frame, ntype))

    @uncompiled
    def apply_edges(self, func: Any, edges: Any = ALL, etype: AnyEtype = None, inplace: bool = False) -> None:
        """Compute edge features from features of sources, destinations and edges, and set them in `edata`.

        Raises the errors of `update_all`.

        Args:
            func: a message function of `dgl.function` or a Python function, as in `update_all`.
            edges: local IDs of the edges to set, (K,) integer; other edges keep their values, or get 0. Default: all.
            etype: edge type; optional if there is only one.
            inplace: ignored; accepted for compatibility with DGL.
        """
        with self._structure.group.guard():
            context = self.call_context(etype)
            frame = self._frames.edge[context.relation.etype]
            for name, values in compute_on_edges(context, self._edge_fields(context), func).items():
                if not (isinstance(edges, str) and edges == ALL):
                    chosen = torch.as_tensor(edges, device=frame.device)
                    if chosen.dim() > 1 or (chosen.numel() and chosen.dtype not in (torch.int64, torch.int32)):
                        raise GraphError(
                            f"edges is {chosen.dtype} of shape {tuple(chosen.shape)}; expected local IDs, (K,) "
                            "integer: of a mask, mask.nonzero().squeeze(1)."
                        )
                    chosen = chosen.long().reshape(-1)
                    before = frame[name] if name in frame else torch.zeros_like(values)
                    values = before.index_copy(0, chosen, values[chosen])
                frame[name] = values

    def call_context(self, etype: AnyEtype = None) -> CallContext:
        """Return the context of a call along one edge type, for layers that need more than `update_all`."""
        if etype is None and len(self._relations) == 1:
            (relation,) = self._relations.values()
        else:
            relation = self._relation(etype)
        return CallContext(self._structure, relation, Settings.current(one_shot=self.one_shot))

    def _edge_fields(self, context: CallContext) -> EdgeFields:
        source, _, destination = etype = context.relation.etype
        return EdgeFields(self._frames.src[source], self._frames.dst[destination], self._frames.edge[etype])

    # -- other views of the same graph

    def __getitem__(self: Self, etype: str | CanonicalEtype) -> Self:
        """The graph of one edge type and the node types that it joins, with the same frames."""
        relation, frames = self._relation(etype), self._frames
        source, _, target = etype = relation.etype
        src, dst = {source: frames.src[source]}, {target: frames.dst[target]}
        if frames.src is frames.dst:
            src = dst = src | dst
        return self._with(relations=[relation], frames=Frames(src, dst, {etype: frames.edge[etype]}))

    def local_var(self: Self) -> Self:
        """Return a graph with the same structure and its own features; setting them does not change this graph."""
        return self._with(frames=self._frames.clone())

    def __reduce__(self) -> Any:
        raise GraphError(
            "A distributed graph belongs to the running workers, so that it cannot be saved. Save model.state_dict(), "
            "give forward the graph instead of keeping it in a module, and make it again by sar.construct_full_graph."
        )

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """The same structure with copies of the fields, such as for a copy of a model that holds its graph."""
        return self._with(frames=deepcopy(self._frames, memo))

    def to(self: Self, device: torch.device | str) -> Self:
        """Return the graph with structure and features on another device."""
        device = torch.empty(0, device=device).device  # lets torch resolve "cuda" to "cuda:0" and "cpu:0" to "cpu"
        if device == self.device:
            return self
        structure = self._structure.to(device)
        relations = [relation for relation in structure.relations if relation.etype in self._relations]
        return self._with(structure, relations, self._frames.clone(device))

    @uncompiled
    def remove_self_loop(self: Self) -> Self:
        """Return a homogeneous graph without its self-loops; other edges keep their features. A collective call."""
        return self._with_self_loops("without self-loops", None)

    @uncompiled
    def add_self_loop(self: Self) -> Self:
        """Return a homogeneous graph with one more self-loop per node, with features of 1. A collective call."""
        return self._with_self_loops("with self-loops", self.node_ranges[self._structure.group.rank][0])

    @lasting
    def _with_self_loops(self: Self, how: str, first_node: int | None) -> Self:
        """The graph that `change_self_loops` makes. `how` describes the change, for the signature."""
        if not self.is_homogeneous:
            raise GraphError("Self-loops are changed on homogeneous graphs only.")
        group, part = self._structure.group, self._structure.group.rank
        with group.guard():
            old = self._relation(None)
            relation, columns = change_self_loops(old, dict(self._frames.edge[old.etype]), group, part, first_node)
        structure = self._structure.with_relations([relation], how)
        frame = self._frames.edge[old.etype]
        edge = {old.etype: Frame(relation.num_edges, frame.device, frame.what, columns)}
        frames = replace(self._frames.clone(), edge=edge)
        return self._with(structure=structure, relations=[relation], frames=frames)

    @property
    def sampling_graph(self) -> Any:
        """A `dgl.DGLGraph` for sampling, with this worker's nodes, their in-edges and the sources of these edges.

        Nodes of each type begin with this worker's nodes, which keep their local IDs; remote sources follow. As in
        DGL's partitions, `ndata["_ID"]` holds global IDs, and `ndata["inner_node"]` is True for this worker's nodes.
        Edges are in the order of this graph, with their current features. The structure is cached; features are new at
        each access. The graph is on the CPU, because DGL samples there.

        Raises:
            GraphError: on message flow graphs.
        """
        shared = self._structure.sampling_graph
        whole = len(self._relations) == len(self._structure.relations) and len(self.ntypes) == len(shared.ntypes)
        graph = (shared if whole else shared[next(iter(self._relations))]).local_var()
        for ntype in graph.ntypes:
            data = graph.nodes[ntype].data
            data.update({name: column.clone() for name, column in data.items()})
        for etype in self._relations:
            fields = self._frames.edge[etype].items()
            graph.edges[etype].data.update({name: column.cpu() for name, column in fields})
        return graph

    def get_full_partition_graph(self, delete_shard_data: bool = True) -> "DistributedBlock":
        """Return the graph in one-shot mode (3): every call fetches all rows that it reads at once and keeps them.

        Args:
            delete_shard_data: ignored; accepted for SAR scripts. Both graphs share the structure. Delete this graph to
                free its features.
        """
        relations = list(self._relations.values())
        return DistributedBlock(self._structure, relations, self._frames.clone(), self.partition_book)

    def _with(
        self: Self,
        structure: Structure | None = None,
        relations: list[Relation] | None = None,
        frames: Frames | None = None,
    ) -> Self:
        """This graph with some parts replaced; None keeps a part."""
        relations = relations or list(self._relations.values())
        return type(self)(structure or self._structure, relations, frames or self._frames, self.partition_book)

    __copy__ = _with

    def __repr__(self) -> str:
        rank, size = self._structure.group.rank, self._structure.group.world_size
        return (
            f"{type(self).__name__}(worker {rank} of {size}: {self.num_nodes()} of {self.num_nodes_global()} nodes, "
            f"{self.num_edges()} of {self.num_edges_global()} edges, types {self.ntypes} {self.canonical_etypes})"
        )


def reduce_across(results: list[dict[str, Tensor]], cross_reducer: Any) -> dict[str, Tensor]:
    """Combine the results of several relations for one node type, field by field.

    As in DGL, the results of a single relation do not change. The cross reducer is sum, mean, max, min, stack (to
    (N, relations, ...)), or a function of a list of tensors.
    """
    if isinstance(cross_reducer, str) and cross_reducer not in CROSS_REDUCERS:
        raise GraphError(
            f"Unknown cross reducer {cross_reducer!r}; expected {', '.join(CROSS_REDUCERS)}, or a function."
        )
    if len(results) == 1 and cross_reducer != "stack":
        return results[0]
    combined = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if callable(cross_reducer):
            combined[name] = cross_reducer(values)
        else:
            combined[name] = CROSS_REDUCERS[cross_reducer](torch.stack(values))
    return combined


def fill_infinities(column: Tensor, reduce_func: Any) -> Tensor:
    """The column with infinities replaced by 0 if the reducer is the built-in max or min; otherwise unchanged."""
    extreme = not is_python(reduce_func) and reduce_func.name in ("max", "min")
    return column.masked_fill(column.isinf(), 0) if extreme else column


Features = Tensor | tuple[Tensor, Tensor]
"""Features of the nodes that a layer is given, or of the sources and of the destinations."""


def layer_inputs(
    graph: GraphShardManager, feat: Features, drop: Callable[[Tensor], Tensor] | None = None
) -> tuple[CallContext, Tensor, Tensor]:
    """The context of a layer's call, and the features of its sources and destinations after dropout.

    Raises a `GraphError` for features that do not fit the nodes.
    """
    context = graph.call_context()
    src, _, dst = context.relation.etype
    if isinstance(feat, tuple):
        graph._frames.src[src].check("h", feat[0])
        graph._frames.dst[dst].check("h", feat[1])
        return (context, *feat) if drop is None else (context, drop(feat[0]), drop(feat[1]))
    graph._frames.src[src].check("h", feat)
    if context.relation.num_dst != context.relation.num_src and not context.structure.is_block:
        graph._frames.dst[dst].check("h", feat)
    source = feat if drop is None else drop(feat)
    return context, source, own_rows(context, source) if context.structure.is_block else source


def own_rows(context: CallContext, values: Tensor) -> Tensor:
    """The rows of the destinations among (N_src, ...) values, which come first on a message flow graph."""
    return values[: context.relation.num_dst] if context.structure.is_block else values


class DistributedBlock(GraphShardManager):
    """A `GraphShardManager` that fetches all remote rows at once. Fastest if the whole halo fits in memory."""

    one_shot = True


def make_graph(structure: Structure, features: list[dict[str, Tensor]], partition_book: Any) -> GraphShardManager:
    """A graph with empty node frames, and `features` of each relation's edges."""
    device = structure.device
    dst = {ntype: Frame(count, device, f"nodes of type {ntype!r}") for ntype, count in structure.dst.counts.items()}
    src = dst
    if structure.is_block:
        src = {t: Frame(count, device, f"source nodes of type {t!r}") for t, count in structure.src.counts.items()}
    edge = {
        relation.etype: Frame(relation.num_edges, device, f"edges of type {relation.etype}", columns)
        for relation, columns in zip(structure.relations, features, strict=True)
    }
    return GraphShardManager(structure, structure.relations, Frames(src, dst, edge), partition_book)
