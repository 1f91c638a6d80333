"""Sampled layers as DGL's own message flow graphs, and pairs of nodes and subgraphs as DGL's graphs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.shim import require_dgl
from sar.common_tuples import NID, CanonicalEtype

Edges = Mapping[CanonicalEtype, tuple[Tensor, Tensor, Mapping[str, Tensor]]]


def make_block(nodes: Mapping[str, Tensor], num_dst: Mapping[str, int], edges: Edges) -> Any:
    """One layer as a `DGLBlock`, with `dgl.NID` on both sides and the edges' fields.

    The structure goes in as CSC, which the forward reads; DGL makes the CSR of the backward from it by counting. Edge
    IDs go with it: without them DGL's kernels for float32 cannot sum edge values.

    Args:
        nodes: global IDs of the sources of every type, (N_src,) int64, destinations first.
        num_dst: destinations of every type.
        edges: by type: (N_dst + 1,) offsets, (E,) positions of the sources, int64 both, and fields, (E, ...) each.
    """
    dgl = require_dgl()
    block = dgl.create_block(
        {etype: ("csc", (indptr, src, torch.arange(len(src)))) for etype, (indptr, src, _) in edges.items()},
        num_src_nodes={ntype: len(ids) for ntype, ids in nodes.items()},
        num_dst_nodes=dict(num_dst),
    )
    for ntype, ids in nodes.items():
        block.srcnodes[ntype].data[NID] = ids
        block.dstnodes[ntype].data[NID] = ids[: num_dst[ntype]]
    for etype, (_, _, fields) in edges.items():
        block.edges[etype].data.update(fields)
    return block


def make_pair_graph(nodes: Mapping[str, Tensor], pairs: Edges) -> Any:
    """A `DGLGraph` with pairs of nodes as edges, with `dgl.NID` and the edges' fields.

    Args:
        nodes: global IDs of every type, (N,) int64.
        pairs: by type: (S,) positions of sources and of destinations, int64, and fields, (S, ...) each.
    """
    ends = {etype: (src, dst) for etype, (src, dst, _) in pairs.items()}
    graph = require_dgl().heterograph(ends, {ntype: len(ids) for ntype, ids in nodes.items()})
    for ntype, ids in nodes.items():
        graph.nodes[ntype].data[NID] = ids
    for etype, (_, _, fields) in pairs.items():
        graph.edges[etype].data.update(fields)
    return graph


def make_subgraph(
    nodes: Tensor, indptr: Tensor, src: Tensor, features: Mapping[str, Tensor], edge_fields: Mapping[str, Tensor]
) -> Any:
    """A `DGLGraph` of one type, as CSC.

    Args:
        nodes: global IDs, (N,) int64, which become `dgl.NID`.
        indptr: (N + 1,) offsets of the nodes' in-edges, int64.
        src: (E,) positions of their sources, int64.
        features: of the nodes, (N, ...) each.
        edge_fields: of the edges, (E, ...) each.
    """
    graph = require_dgl().graph(("csc", (indptr, src, torch.arange(len(src)))), num_nodes=len(nodes))
    graph.ndata.update({NID: nodes, **features})
    graph.edata.update(edge_fields)
    return graph


def attach_features(
    blocks: Sequence[Any], inputs: Mapping[str, Mapping[str, Tensor]], outputs: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Set features, by node type and name, on the first block's sources and on the last block's destinations."""
    for ntype, fields in inputs.items():
        blocks[0].srcnodes[ntype].data.update(fields)
    for ntype, fields in outputs.items():
        blocks[-1].dstnodes[ntype].data.update(fields)
