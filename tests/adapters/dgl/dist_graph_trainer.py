"""What the tests of `convert_dist_graph` run: a model on a graph, and the script of a DistDGL cluster's trainers."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sar
from sar.adapters.dgl.shim import require_dgl

dgl = require_dgl()
from dgl.nn import HeteroGraphConv, SAGEConv  # noqa: E402

Results = dict[str, dict[str, Tensor]]


def homogeneous_graph() -> Any:
    """A multigraph with self-loops and isolated nodes."""
    random = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, 55, (2, 300), generator=random)
    dst[:10] = src[:10]
    return with_fields(dgl.graph((src, dst), num_nodes=60), random)


def heterogeneous_graph() -> Any:
    """Three node types, and an edge type into each."""
    random = torch.Generator().manual_seed(1)
    sizes = {"author": 30, "paper": 40, "venue": 12}
    pairs = {("author", "writes", "paper"): 150, ("paper", "in", "venue"): 90, ("venue", "invites", "author"): 50}
    pairs |= {("paper", "cites", "paper"): 120}
    edges = {
        etype: tuple(torch.randint(0, sizes[ntype], (count,), generator=random) for ntype in (etype[0], etype[2]))
        for etype, count in pairs.items()
    }
    return with_fields(dgl.heterograph(edges, num_nodes_dict=sizes), random)


def with_fields(graph: Any, random: torch.Generator) -> Any:
    """Nodes get x and a cotangent c, edges a weight w, float64; both get the number that they have here, and a mask."""
    for frame, count in [
        *((graph.nodes[ntype].data, graph.num_nodes(ntype)) for ntype in graph.ntypes),
        *((graph.edges[etype].data, graph.num_edges(etype)) for etype in graph.canonical_etypes),
    ]:
        frame["number"] = torch.arange(count)
        frame["mask"] = torch.rand(count, generator=random) < 0.5
    for ntype in graph.ntypes:
        for name, width in (("x", 4), ("c", 3)):
            rows = torch.randn(graph.num_nodes(ntype), width, generator=random, dtype=torch.float64)
            graph.nodes[ntype].data[name] = rows
    for etype in graph.canonical_etypes:
        graph.edges[etype].data["w"] = torch.rand(graph.num_edges(etype), generator=random, dtype=torch.float64)
    return graph


def evaluate(graph: Any) -> dict[str, Results]:
    """Fields, outputs and gradients by node type, edge type or parameter, of two layers with edge weights."""
    torch.manual_seed(7)
    x = {ntype: graph.nodes[ntype].data["x"].clone().requires_grad_() for ntype in graph.ntypes}
    w = {etype: graph.edges[etype].data["w"].clone().requires_grad_() for etype in graph.canonical_etypes}
    weights = {etype[1]: {"edge_weight": values} for etype, values in w.items()}
    layers = torch.nn.ModuleList(
        HeteroGraphConv({etype[1]: SAGEConv(*widths, "mean") for etype in graph.canonical_etypes}, aggregate="sum")
        for widths in ((4, 5), (5, 3))
    ).double()
    h: Any = x
    for layer in layers:
        h = layer(graph, h, mod_kwargs=weights)
    sum((h[ntype] * graph.nodes[ntype].data["c"]).sum() for ntype in graph.ntypes).backward()
    if dist.is_initialized():
        sar.gather_grads(layers)
    nodes = {n: dict(graph.nodes[n].data) | {"output": h[n].detach(), "grad": x[n].grad} for n in graph.ntypes}
    edges = {":".join(e): dict(graph.edges[e].data) | {"grad": w[e].grad} for e in graph.canonical_etypes}
    return {"nodes": nodes, "edges": edges, "parameters": {"grad": {k: p.grad for k, p in layers.named_parameters()}}}


def main() -> None:
    import distdgl_cluster  # noqa: F401  its launcher puts it on the path

    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    dist.init_process_group("gloo")
    dist_graph = dgl.distributed.DistGraph("graph")
    sar.initialize_comms()
    graph = sar.convert_dist_graph(dist_graph)
    assert graph.partition_book.partid == sar.rank()
    torch.save((graph.node_ranges, evaluate(graph)), f"{sys.argv[1]}/{sar.rank()}.pt")


if __name__ == "__main__":
    main()
