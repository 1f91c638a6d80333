"""Methods and functions of DGL that distributed graphs do not support, and the advice that their errors give.

docs/graph_methods.md lists the advice for each method.
"""

import sys
from types import FrameType

from sar.errors import MissingMethodError

_EDGES = "use graph.sampling_graph, a DGLGraph of all edges into this worker's nodes, with global IDs in ndata['_ID']"
_WHOLE = "it has no distributed form; use it before partitioning, or on graph.sampling_graph, this worker's part"
_INSTEAD = {
    "change the graph before it is partitioned, with DGL and sar.partition_graph, or with options of `sar "
    "partition` such as --undirected": (
        "add_edges add_nodes add_reverse_edges line_graph remove_edges remove_nodes reorder_graph reverse "
        "to_bidirected to_heterogeneous to_homogeneous to_simple"
    ),
    "call graph.add_self_loop() or graph.remove_self_loop(), or let `sar partition` do it": (
        "add_self_loop remove_self_loop AddSelfLoop RemoveSelfLoop"
    ),
    _EDGES: (
        "adj adj_external adj_tensors adjacency_matrix all_edges edge_ids edges find_edges has_edges_between "
        "in_edges inc incidence_matrix is_multigraph predecessors to_cugraph to_networkx"
    ),
    "edges are stored with their destinations; graph.out_degrees() counts out-edges over all workers": (
        "out_edges out_subgraph successors"
    ),
    "use sar.construct_mfgs for the graphs that some nodes' outputs need, sar.DataLoader for batches": (
        "edge_subgraph in_subgraph khop_in_subgraph khop_out_subgraph node_subgraph prop_edges prop_nodes pull push "
        "send_and_recv subgraph to_block"
    ),
    "sar.DataLoader samples the whole graph, with sar.DistNeighborSampler or sar.EdgePredictionSampler": (
        "node2vec_random_walk random_walk sample_etype_neighbors sample_labors sample_neighbors "
        "sample_neighbors_biased sample_neighbors_fused select_topk"
    ),
    "sar.EdgePredictionSampler draws negative pairs from the whole graph": "global_uniform_negative_sampling",
    "combine the rows of all workers by sar.nn.global_mean(x), global_max(x) or global_sum(x.sum(0))": (
        "max_edges max_nodes mean_edges mean_nodes readout_edges readout_nodes softmax_edges softmax_nodes "
        "sum_edges sum_nodes topk_edges topk_nodes"
    ),
    "call sar.edge_softmax, or sar.patch_dgl() before it": "edge_softmax",
    "draw edges to keep of graph.sampling_graph, and call sar.pair_graph with the global IDs of their ends": "DropEdge",
    "graph[etype] is the graph of one edge type": "edge_type_subgraph node_type_subgraph",
    'compute the feature directly, as in graph.ndata["h"] = f(graph.ndata["h"])': "apply_nodes",
    'select by the feature, as in (graph.ndata["h"] > 0).nonzero()': "filter_edges filter_nodes",
    "ndata and edata are dictionaries of tensors": (
        "edge_attr_schemes get_edge_storage get_node_storage materialize_data node_attr_schemes set_e_initializer "
        "set_n_initializer"
    ),
    "use graph.local_var(), which has separate features": "clone",
    "use graph.to(device), which moves the graph and its features": (
        "cpu is_pinned pin_memory_ record_stream shared_memory unpin_memory_"
    ),
    "omit it; edges are stored in one format, and IDs are int64": "astype create_formats_ formats int long",
    "omit it; the graph is not a batch of graphs": "batch_num_edges set_batch_num_edges set_batch_num_nodes",
    "ntypes, srctypes, dsttypes and canonical_etypes list all types": (
        "get_etype_id get_ntype_id get_ntype_id_from_dst get_ntype_id_from_src is_unibipartite metagraph"
    ),
    "global IDs count from 0 to graph.num_nodes_global() - 1": "has_nodes",
}
INSTEAD = {name: advice for advice, names in _INSTEAD.items() for name in names.split()}
"""Advice by the name of a method of `DGLGraph`, or of a function of DGL that takes a graph."""

_BETWEEN = ("sar", "torch", "contextlib", "functools")
"""Packages whose frames may lie between one of DGL and the graph."""


def missing_method(name: str) -> MissingMethodError:
    """The error for an attribute that distributed graphs lack. It names the calling layer or function of DGL."""
    function, is_layer = asked_by_dgl()
    if is_layer and name not in INSTEAD:
        return MissingMethodError(
            f"{function} of DGL reads graph.{name}, which a distributed graph has not. Call sar.patch_dgl() where "
            "Config.patch_dgl is False or DGL was imported after the graph was made; docs/layers.md lists what runs."
        )
    if function and not is_layer:
        advice = INSTEAD.get(function.rpartition(".")[2], _WHOLE)
        return MissingMethodError(f"{function} takes no distributed graph: {advice}.")
    if name in INSTEAD:
        asked = f"{function} of DGL: " if is_layer else ""
        return MissingMethodError(f"{asked}graph.{name} is not there on a distributed graph: {INSTEAD[name]}.")
    return MissingMethodError(f"A distributed graph has no attribute {name!r}.")


def asked_by_dgl() -> tuple[str, bool]:
    """Return the calling layer of DGL, or the public name of its outermost function; empty if user code called.

    The second item is True for a layer.
    """
    frame: FrameType | None = sys._getframe(1)
    outermost = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if module.startswith("dgl.nn.") and "self" in frame.f_locals:
            return type(frame.f_locals["self"]).__name__, True
        if package == "dgl":
            outermost = frame
        elif package not in _BETWEEN:
            break
        frame = frame.f_back
    return _public_name(outermost) if outermost else "", False


def _public_name(frame: FrameType) -> str:
    """The public name of the function or class of DGL that a frame runs, such as `dgl.ops.copy_u_sum`."""
    code, names, known = frame.f_code, frame.f_locals, frame.f_globals
    value = type(names["self"]) if "self" in names else known.get(code.co_name)
    for function in list(known.values()):  # functions of `dgl.ops` share their code and differ in their closures
        if getattr(function, "__code__", None) is code:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            value = function if cells == [names[variable] for variable in code.co_freevars] else value
    name, module = getattr(value, "__name__", code.co_name), known["__name__"]
    packages = [module[:end] for end in range(len(module)) if module[end] == "."]
    return f"{next((p for p in packages if getattr(sys.modules[p], name, None) is value), module)}.{name}"
