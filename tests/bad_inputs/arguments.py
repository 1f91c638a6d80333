"""Arguments of the graph's methods, of samplers, embeddings and collectives that make no sense."""

from functools import partial

import dgl
import dgl.function as fn
import torch

import sar
from tests.bad_inputs import Case
from tests.bad_inputs.fields import N, graph, typed
from tests.sampling.scenes import parts_of


def batches(seeds, **options):
    """The first batch of a loader."""
    options = {"batch_size": 4} | options
    return next(iter(sar.DataLoader(graph(), seeds, sar.DistNeighborSampler([2]), **options)))


def across(reducer):
    """`multi_update_all` with this reducer across edge types."""
    here = typed()
    here.srcdata["x"] = {ntype: torch.ones(here.num_nodes(ntype), 1) for ntype in here.ntypes}
    functions = fn.copy_u("x", "m"), fn.sum("m", "out")
    here.multi_update_all(dict.fromkeys(here.canonical_etypes, functions), reducer)


def sample(fanouts, **options):
    return sar.DistNeighborSampler(fanouts, **options).sample(graph(), torch.arange(3))


def embedding(*args, **options):
    return sar.nn.DistEmbedding(graph(), *args, **options)


def unpatched():
    """A layer that needs a patch, where DGL is kept as it is."""
    sar.unpatch_dgl()
    sar.Config.patch_dgl = False
    dgl.nn.GATConv(2, 2, 1, allow_zero_in_degree=True)(graph(), torch.ones(N, 2))


case = partial(Case, error="GraphError")

CASES = {
    "a sampler of DGL's": case(
        lambda: sar.DataLoader(graph(), torch.arange(3), dgl.dataloading.NeighborSampler([2])),
        "The sampler is",
        error="ConfigError",
    ),
    "something else for the graph": case(
        lambda: sar.DataLoader("data", torch.arange(3), sar.DistNeighborSampler([2])),
        "The graph is 'data'",
        error="ConfigError",
    ),
    "DGL's self-loops": case(
        lambda: dgl.add_self_loop(graph()), "dgl.add_self_loop takes no distributed", error="MissingMethodError"
    ),
    "self-loops to remove, by DGL": case(
        lambda: dgl.remove_self_loop(graph()), "dgl.remove_self_loop takes no distributed", error="MissingMethodError"
    ),
    "a graph to reverse": case(
        lambda: dgl.reverse(graph()), "dgl.reverse takes no distributed graph", error="MissingMethodError"
    ),
    "a graph to make undirected": case(
        lambda: dgl.to_bidirected(graph()), "dgl.to_bidirected takes no distributed", error="MissingMethodError"
    ),
    "a graph to make homogeneous": case(
        lambda: dgl.to_homogeneous(typed()), "dgl.to_homogeneous takes no distributed", error="MissingMethodError"
    ),
    "a subgraph by DGL": case(
        lambda: dgl.node_subgraph(graph(), [0]), "dgl.node_subgraph takes no distributed", error="MissingMethodError"
    ),
    "a block by DGL": case(
        lambda: dgl.to_block(graph()), "dgl.to_block takes no distributed graph", error="MissingMethodError"
    ),
    "neighbours sampled by DGL": case(
        lambda: dgl.sampling.sample_neighbors(graph(), [0], 2),
        "dgl.sampling.sample_neighbors takes no",
        error="MissingMethodError",
    ),
    "a walk by DGL": case(
        lambda: dgl.sampling.random_walk(graph(), [0], length=2),
        "dgl.sampling.random_walk takes no",
        error="MissingMethodError",
    ),
    "the ends of all edges": case(
        lambda: graph().edges(), "graph.edges is not there on a distributed", error="MissingMethodError"
    ),
    "the ends of all edges, as DGL orders them": case(
        lambda: graph().edges(form="uv", order="eid"),
        "graph.edges is not there on a distributed",
        error="MissingMethodError",
    ),
    "the ends of an edge": case(
        lambda: graph().find_edges(0), "graph.find_edges is not there on a", error="MissingMethodError"
    ),
    "an adjacency matrix": case(
        lambda: graph().adj(), "graph.adj is not there on a distributed", error="MissingMethodError"
    ),
    "DGL's IDs of 32 bits": case(
        lambda: graph().int(), "graph.int is not there on a distributed", error="MissingMethodError"
    ),
    "an attribute that no graph has": case(
        lambda: graph().nodez, "A distributed graph has no attribute", error="MissingMethodError"
    ),
    "a layer of DGL that is not patched": case(
        unpatched, "GATConv of DGL reads graph._graph, which a", error="MissingMethodError"
    ),
    "a mask of bytes as seeds": case(
        lambda: batches(torch.ones(20).byte()), "the seeds of worker 0 are torch.uint8 of"
    ),
    "a mask of bytes as seeds of a type": case(
        lambda: batches({"_N": torch.ones(20).byte()}), "seeds['_N'] are torch.uint8 of shape"
    ),
    "a mask for message flow graphs": case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.ones(20).bool(), 2),
        "seed_nodes are torch.bool of shape",
    ),
    "a mask of edges": case(
        lambda: graph().apply_edges(lambda edges: {"w": edges.data["_ID"]}, edges=torch.ones(60).bool()),
        "edges is torch.bool of shape",
    ),
    "a graph of nothing": case(
        lambda: sar.construct_full_graph(None), "The data of a partition is a NoneType", error="PartitionError"
    ),
    "a graph of DGL's graph": case(
        lambda: sar.construct_full_graph(dgl.graph(([0], [1]))),
        "The data of a partition is a DGLGraph",
        error="PartitionError",
    ),
    "an edge type that is not there": case(
        lambda: graph()["likes"], "'likes' is not an edge type of this graph", error="FieldError"
    ),
    "a node type that is not there": case(
        lambda: typed().num_nodes("car"), "There is no node type 'car' here", error="FieldError"
    ),
    "no edge type where there are several": case(
        lambda: typed().update_all(fn.copy_u("x", "m"), fn.sum("m", "out")), "The graph has 3 edge types"
    ),
    "no node type where there are several": case(
        lambda: sar.nn.DistEmbedding(typed(), 3), "The graph has several node types"
    ),
    "a cross reducer that is not there": case(lambda: across("median"), "Unknown cross reducer 'median'"),
    "the in-degree of a node that is not there": case(lambda: graph().in_degrees([99]), "There is no node 99 here"),
    "the out-degree of a negative node": case(lambda: graph().out_degrees(-5), "There is no node -5 here"),
    "features by a name that is not there": case(
        lambda: sar.suffix_key_lookup({"a/feat": 1, "b/label": 2}, "eat"),
        "There is no feature 'eat'",
        error="FieldError",
    ),
    "features by a name that two types have": case(
        lambda: sar.suffix_key_lookup({"a/feat": 1, "b/feat": 2}, "feat"),
        "Several features are called 'feat'",
        error="FieldError",
    ),
    "message flow graphs without layers": case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.arange(3), 0), "construct_mfgs got n_layers=0"
    ),
    "message flow graphs for foreign nodes": case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.tensor([55]), 2),
        "1 of seed_nodes, such as 55, are not of",
    ),
    "another graph to convert": case(lambda: sar.convert_dist_graph(5), "convert_dist_graph was given a int"),
    "a seed that is not there": case(
        lambda: batches(torch.tensor([99])), "1 of the seeds of worker 0, such as 99, are"
    ),
    "a negative seed": case(lambda: batches(torch.tensor([-1])), "1 of the seeds of worker 0, such as -1, are"),
    "a seed twice": case(lambda: batches(torch.tensor([1, 1])), "1 of the seeds of worker 0 are given twice"),
    "seeds that are no integers": case(
        lambda: batches(torch.tensor([1.0])), "the seeds of worker 0 are torch.float32 of"
    ),
    "seeds in two dimensions": case(
        lambda: batches(torch.ones(2, 2).long()), "the seeds of worker 0 are torch.int64 of"
    ),
    "a mask of another length": case(lambda: batches(torch.ones(7).bool()), "seeds is a mask of"),
    "seeds to share out that are not there": case(
        lambda: sar.split_seeds(graph(), torch.tensor([77])), "1 of the seeds of worker 0, such as 77, are"
    ),
    "batches without seeds in them": case(
        lambda: batches(torch.arange(4), batch_size=0), "batch_size is 0", error="ConfigError"
    ),
    "batches of half a seed": case(
        lambda: batches(torch.arange(4), batch_size=2.5), "batch_size is 2.5", error="ConfigError"
    ),
    "less than no batch ahead": case(
        lambda: batches(torch.arange(4), num_workers=-1), "num_workers is -1", error="ConfigError"
    ),
    "one fan-out without a list": case(lambda: sample(5), "fanouts is 5", error="ConfigError"),
    "a negative fan-out": case(lambda: sample([-2]), "fanouts[0] has -2", error="ConfigError"),
    "a fan-out that is no integer": case(lambda: sample([1.5]), "fanouts[0] has 1.5", error="ConfigError"),
    "a fan-out for an edge type that is not there": case(
        lambda: sample([{"likes": 1}]), "'likes' is not an edge type of this graph", error="FieldError"
    ),
    "weights that are not there": case(
        lambda: sample([2], prob="w"), "prob='w' is not an edge field of the graph", error="FieldError"
    ),
    "input features of too few nodes": case(
        lambda: sample([2], input_node_features={"x": torch.ones(3, 1)}),
        "input_node_features['x'] has shape",
        error="FieldError",
    ),
    "input features that are a list": case(
        lambda: sample([2], input_node_features={"x": [1] * N}),
        "input_node_features['x'] is a list",
        error="ConfigError",
    ),
    "input features without a name": case(
        lambda: sample([2], input_node_features=torch.ones(N, 2)),
        "input_node_features is a Tensor",
        error="ConfigError",
    ),
    "an embedding of no dimension": case(lambda: embedding(0), "embedding_dim is 0", error="ConfigError"),
    "an embedding of a type that is not there": case(
        lambda: sar.nn.DistEmbedding(typed(), 3, "car"), "There is no node type 'car' here", error="FieldError"
    ),
    "initial rows of another shape": case(
        lambda: embedding(3, init_func=lambda shape, dtype: torch.ones(2, 2)), "init_func made rows of"
    ),
    "a lookup of a node that is not there": case(
        lambda: embedding(3)(torch.tensor([99])), "1 of the IDs, such as 99, are not of the"
    ),
    "a lookup by a number that is no ID": case(
        lambda: embedding(3)(torch.tensor([1.0])), "The nodes are torch.float32"
    ),
    "parameters for an optimizer of embeddings": case(
        lambda: sar.nn.SparseAdam([torch.nn.Parameter(torch.ones(2))]),
        "SparseAdam got ['Parameter']",
        error="ConfigError",
    ),
    "a negative learning rate": case(
        lambda: sar.nn.SparseAdam([embedding(3)], lr=-1),
        "lr is -1; expected a number of at least 0",
        error="ConfigError",
    ),
    "a moment that never decays": case(
        lambda: sar.nn.SparseAdam([embedding(3)], betas=(1.0, 0.9)),
        "betas is (1.0, 0.9); expected two numbers",
        error="ConfigError",
    ),
    "no tensor for every worker": case(
        lambda: sar.comm.all_to_all([], []), "all_to_all got 0 tensors to receive into", error="ConfigError"
    ),
    "a worker that is not there": case(
        lambda: sar.comm.exchange_single_tensor(3, 0, torch.ones(1), torch.ones(1)),
        "exchange_single_tensor names 3 and 0",
        error="ConfigError",
    ),
    "another rank than that of the group": case(
        lambda: sar.initialize_comms(5, 1, "127.0.0.1"),
        "initialize_comms asks for rank 5, but the",
        error="ConfigError",
    ),
    "another number of workers than the group's": case(
        lambda: sar.initialize_comms(0, 2, "127.0.0.1"),
        "initialize_comms asks for world size 2, but",
        error="ConfigError",
    ),
    "a partition that is not there": case(
        lambda: sar.load_dgl_partition_data("/nowhere/graph.json", 0, "cpu"),
        "Cannot read /nowhere/graph.json",
        error="PartitionError",
    ),
}
