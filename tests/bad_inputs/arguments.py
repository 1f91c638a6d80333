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
        "The sampler is <dgl.dataloading.neighbor_sampler.NeighborSampler object at ...>; expected "
        "sar.DistNeighborSampler or the like.",
        error="ConfigError",
    ),
    "something else for the graph": case(
        lambda: sar.DataLoader("data", torch.arange(3), sar.DistNeighborSampler([2])),
        "The graph is 'data'; expected a distributed one, as data.graph.",
        error="ConfigError",
    ),
    "DGL's self-loops": case(
        lambda: dgl.add_self_loop(graph()),
        "dgl.add_self_loop takes no distributed graph: call graph.add_self_loop() or graph.remove_self_loop(), "
        "or let `sar partition` do it.",
        error="MissingMethodError",
    ),
    "self-loops to remove, by DGL": case(
        lambda: dgl.remove_self_loop(graph()),
        "dgl.remove_self_loop takes no distributed graph: call graph.add_self_loop() or "
        "graph.remove_self_loop(), or let `sar partition` do it.",
        error="MissingMethodError",
    ),
    "a graph to reverse": case(
        lambda: dgl.reverse(graph()),
        "dgl.reverse takes no distributed graph: change the graph before it is partitioned, with DGL and "
        "sar.partition_graph, or with options of `sar partition` such as --undirected.",
        error="MissingMethodError",
    ),
    "a graph to make undirected": case(
        lambda: dgl.to_bidirected(graph()),
        "dgl.to_bidirected takes no distributed graph: change the graph before it is partitioned, with DGL and "
        "sar.partition_graph, or with options of `sar partition` such as --undirected.",
        error="MissingMethodError",
    ),
    "a graph to make homogeneous": case(
        lambda: dgl.to_homogeneous(typed()),
        "dgl.to_homogeneous takes no distributed graph: change the graph before it is partitioned, with DGL and "
        "sar.partition_graph, or with options of `sar partition` such as --undirected.",
        error="MissingMethodError",
    ),
    "a subgraph by DGL": case(
        lambda: dgl.node_subgraph(graph(), [0]),
        "dgl.node_subgraph takes no distributed graph: use sar.construct_mfgs for the graphs that some nodes' "
        "outputs need, sar.DataLoader for batches.",
        error="MissingMethodError",
    ),
    "a block by DGL": case(
        lambda: dgl.to_block(graph()),
        "dgl.to_block takes no distributed graph: use sar.construct_mfgs for the graphs that some nodes' outputs "
        "need, sar.DataLoader for batches.",
        error="MissingMethodError",
    ),
    "neighbours sampled by DGL": case(
        lambda: dgl.sampling.sample_neighbors(graph(), [0], 2),
        "dgl.sampling.sample_neighbors takes no distributed graph: sar.DataLoader samples the whole graph, with "
        "sar.DistNeighborSampler and others.",
        error="MissingMethodError",
    ),
    "a walk by DGL": case(
        lambda: dgl.sampling.random_walk(graph(), [0], length=2),
        "dgl.sampling.random_walk takes no distributed graph: sar.DataLoader samples the whole graph, with "
        "sar.DistNeighborSampler and others.",
        error="MissingMethodError",
    ),
    "the ends of all edges": case(
        lambda: graph().edges(),
        "graph.edges is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all edges into "
        "this worker's nodes, with global IDs in ndata['_ID'].",
        error="MissingMethodError",
    ),
    "the ends of all edges, as DGL orders them": case(
        lambda: graph().edges(form="uv", order="eid"),
        "graph.edges is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all edges into "
        "this worker's nodes, with global IDs in ndata['_ID'].",
        error="MissingMethodError",
    ),
    "the ends of an edge": case(
        lambda: graph().find_edges(0),
        "graph.find_edges is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all edges "
        "into this worker's nodes, with global IDs in ndata['_ID'].",
        error="MissingMethodError",
    ),
    "an adjacency matrix": case(
        lambda: graph().adj(),
        "graph.adj is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all edges into "
        "this worker's nodes, with global IDs in ndata['_ID'].",
        error="MissingMethodError",
    ),
    "DGL's IDs of 32 bits": case(
        lambda: graph().int(),
        "graph.int is not there on a distributed graph: leave it out; edges are kept in one format, and IDs are int64.",
        error="MissingMethodError",
    ),
    "an attribute that no graph has": case(
        lambda: graph().nodez, "A distributed graph has no attribute 'nodez'.", error="MissingMethodError"
    ),
    "a layer of DGL that is not patched": case(
        unpatched,
        "GATConv of DGL reads graph._graph, which a distributed graph has not. Call sar.patch_dgl() where "
        "Config.patch_dgl is False or DGL was imported after the graph was made; docs/layers.md lists what runs.",
        error="MissingMethodError",
    ),
    "a mask of bytes as seeds": case(
        lambda: batches(torch.ones(20).byte()),
        "the seeds of worker 0 are torch.uint8 of shape (20,); expected integer global IDs, (S,). Call .bool() "
        "on a mask.",
    ),
    "a mask of bytes as seeds of a type": case(
        lambda: batches({"_N": torch.ones(20).byte()}),
        "seeds['_N'] are torch.uint8 of shape (20,); expected integer rows, (S,). Call .bool() on a mask.",
    ),
    "a mask for message flow graphs": case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.ones(20).bool(), 2),
        "seed_nodes are torch.bool of shape (20,); expected integer global IDs, (S,). Of a mask, pass the rows "
        "by node type: {ntype: mask.nonzero().squeeze(1)}.",
    ),
    "a mask of edges": case(
        lambda: graph().apply_edges(lambda edges: {"w": edges.data["_ID"]}, edges=torch.ones(60).bool()),
        "edges is torch.bool of shape (60,); expected local IDs, (K,) integer: of a mask, mask.nonzero().squeeze(1).",
    ),
    "a graph of nothing": case(
        lambda: sar.construct_full_graph(None),
        "The data of a partition is a NoneType; expected what load_dgl_partition_data returns.",
        error="PartitionError",
    ),
    "a graph of DGL's graph": case(
        lambda: sar.construct_full_graph(dgl.graph(([0], [1]))),
        "The data of a partition is a DGLGraph; expected what load_dgl_partition_data returns.",
        error="PartitionError",
    ),
    "an edge type that is not there": case(
        lambda: graph()["likes"],
        "'likes' is not an edge type of this graph; the edge types are [('_N', '_E', '_N')].",
        error="FieldError",
    ),
    "a node type that is not there": case(
        lambda: typed().num_nodes("car"),
        "There is no node type 'car' here; expected one of ['item', 'user'].",
        error="FieldError",
    ),
    "no edge type where there are several": case(
        lambda: typed().update_all(fn.copy_u("x", "m"), fn.sum("m", "out")),
        "The graph has 3 edge types; name one of [('item', 'bought by', 'user'), ('user', 'buys', 'item'), "
        "('user', 'follows', 'user')].",
    ),
    "no node type where there are several": case(
        lambda: sar.nn.DistEmbedding(typed(), 3), "The graph has several node types; name one of ['item', 'user']."
    ),
    "a cross reducer that is not there": case(
        lambda: across("median"), "Unknown cross reducer 'median'; expected sum, mean, max, min, stack, or a function."
    ),
    "the in-degree of a node that is not there": case(
        lambda: graph().in_degrees([99]), "There is no node 99 here; expected local IDs from 0 to 19."
    ),
    "the out-degree of a negative node": case(
        lambda: graph().out_degrees(-5), "There is no node -5 here; expected local IDs from 0 to 19."
    ),
    "features by a name that is not there": case(
        lambda: sar.suffix_key_lookup({"a/feat": 1, "b/label": 2}, "eat"),
        "There is no feature 'eat'; expected one of ['a/feat', 'b/label'].",
        error="FieldError",
    ),
    "features by a name that two types have": case(
        lambda: sar.suffix_key_lookup({"a/feat": 1, "b/feat": 2}, "feat"),
        "Several features are called 'feat': ['a/feat', 'b/feat']. Name one of them with its type.",
        error="FieldError",
    ),
    "message flow graphs without layers": case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.arange(3), 0),
        "construct_mfgs got n_layers=0; expected at least 1.",
    ),
    "message flow graphs for foreign nodes": case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.tensor([55]), 2),
        "1 of seed_nodes, such as 55, are not of this worker's partition, which has the global IDs [0, 20) "
        "there; pass global IDs from there.",
    ),
    "another graph to convert": case(
        lambda: sar.convert_dist_graph(5), "convert_dist_graph was given a int; expected a DistGraph of DGL."
    ),
    "a seed that is not there": case(
        lambda: batches(torch.tensor([99])),
        "1 of the seeds of worker 0, such as 99, are not of this worker's partition, which has the global IDs "
        "[0, 20) there; pass global IDs from there.",
    ),
    "a negative seed": case(
        lambda: batches(torch.tensor([-1])),
        "1 of the seeds of worker 0, such as -1, are not of this worker's partition, which has the global IDs "
        "[0, 20) there; pass global IDs from there.",
    ),
    "a seed twice": case(
        lambda: batches(torch.tensor([1, 1])), "1 of the seeds of worker 0 are given twice; pass each once."
    ),
    "seeds that are no integers": case(
        lambda: batches(torch.tensor([1.0])),
        "the seeds of worker 0 are torch.float32 of shape (1,); expected integer global IDs, (S,).",
    ),
    "seeds in two dimensions": case(
        lambda: batches(torch.ones(2, 2).long()),
        "the seeds of worker 0 are torch.int64 of shape (2, 2); expected integer global IDs, (S,).",
    ),
    "a mask of another length": case(
        lambda: batches(torch.ones(7).bool()), "seeds is a mask of (7,); expected one over this worker's nodes, (20,)."
    ),
    "seeds to share out that are not there": case(
        lambda: sar.split_seeds(graph(), torch.tensor([77])),
        "1 of the seeds of worker 0, such as 77, are not of this worker's partition, which has the global IDs "
        "[0, 20) there; pass global IDs from there.",
    ),
    "batches without seeds in them": case(
        lambda: batches(torch.arange(4), batch_size=0),
        "batch_size is 0; expected an integer of at least 1.",
        error="ConfigError",
    ),
    "batches of half a seed": case(
        lambda: batches(torch.arange(4), batch_size=2.5),
        "batch_size is 2.5; expected an integer of at least 1.",
        error="ConfigError",
    ),
    "less than no batch ahead": case(
        lambda: batches(torch.arange(4), num_workers=-1), "num_workers is -1; expected at least 0.", error="ConfigError"
    ),
    "one fan-out without a list": case(
        lambda: sample(5),
        "fanouts is 5; expected a list with a number for each layer, such as [15, 10].",
        error="ConfigError",
    ),
    "a negative fan-out": case(
        lambda: sample([-2]),
        "fanouts[0] has -2; expected an integer of at least 0, or -1 for all.",
        error="ConfigError",
    ),
    "a fan-out that is no integer": case(
        lambda: sample([1.5]),
        "fanouts[0] has 1.5; expected an integer of at least 0, or -1 for all.",
        error="ConfigError",
    ),
    "a fan-out for an edge type that is not there": case(
        lambda: sample([{"likes": 1}]),
        "'likes' is not an edge type of this graph; the edge types are [('_N', '_E', '_N')].",
        error="FieldError",
    ),
    "weights that are not there": case(
        lambda: sample([2], prob="w"),
        "prob='w' is not an edge field of the graph; expected one of ['_ID', 'orig_id'].",
        error="FieldError",
    ),
    "input features of too few nodes": case(
        lambda: sample([2], input_node_features={"x": torch.ones(3, 1)}),
        "input_node_features['x'] has shape (3, 1); expected a row for each of this worker's 20 nodes of type '_N'.",
        error="FieldError",
    ),
    "input features that are a list": case(
        lambda: sample([2], input_node_features={"x": [1] * N}),
        "input_node_features['x'] is a list; expected a tensor.",
        error="ConfigError",
    ),
    "input features without a name": case(
        lambda: sample([2], input_node_features=torch.ones(N, 2)),
        "input_node_features is a Tensor; expected a dictionary from name to tensor.",
        error="ConfigError",
    ),
    "an embedding of no dimension": case(
        lambda: embedding(0), "embedding_dim is 0; expected an integer of at least 1.", error="ConfigError"
    ),
    "an embedding of a type that is not there": case(
        lambda: sar.nn.DistEmbedding(typed(), 3, "car"),
        "There is no node type 'car' here; expected one of ['item', 'user'].",
        error="FieldError",
    ),
    "initial rows of another shape": case(
        lambda: embedding(3, init_func=lambda shape, dtype: torch.ones(2, 2)),
        "init_func made rows of (2, 2); expected (20, 3).",
    ),
    "a lookup of a node that is not there": case(
        lambda: embedding(3)(torch.tensor([99])),
        "1 of the IDs, such as 99, are not of the graph's nodes; expected global IDs from 0 to 19.",
    ),
    "a lookup by a number that is no ID": case(
        lambda: embedding(3)(torch.tensor([1.0])), "The nodes are torch.float32 (1,); expected global IDs, (K,) int64."
    ),
    "parameters for an optimizer of embeddings": case(
        lambda: sar.nn.SparseAdam([torch.nn.Parameter(torch.ones(2))]),
        "SparseAdam got ['Parameter']; expected a list of DistEmbedding. Other parameters belong in an optimizer "
        "of torch.",
        error="ConfigError",
    ),
    "a negative learning rate": case(
        lambda: sar.nn.SparseAdam([embedding(3)], lr=-1),
        "lr is -1; expected a number of at least 0.",
        error="ConfigError",
    ),
    "a moment that never decays": case(
        lambda: sar.nn.SparseAdam([embedding(3)], betas=(1.0, 0.9)),
        "betas is (1.0, 0.9); expected two numbers from 0 to below 1.",
        error="ConfigError",
    ),
    "no tensor for every worker": case(
        lambda: sar.comm.all_to_all([], []),
        "all_to_all got 0 tensors to receive into and 0 to send; expected one of each for all 1 workers.",
        error="ConfigError",
    ),
    "a worker that is not there": case(
        lambda: sar.comm.exchange_single_tensor(3, 0, torch.ones(1), torch.ones(1)),
        "exchange_single_tensor names 3 and 0; expected ranks below 1.",
        error="ConfigError",
    ),
    "another rank than that of the group": case(
        lambda: sar.initialize_comms(5, 1, "127.0.0.1"),
        "initialize_comms asks for rank 5, but the existing process group has 0.",
        error="ConfigError",
    ),
    "another number of workers than the group's": case(
        lambda: sar.initialize_comms(0, 2, "127.0.0.1"),
        "initialize_comms asks for world size 2, but the existing process group has 1.",
        error="ConfigError",
    ),
    "a partition that is not there": case(
        lambda: sar.load_dgl_partition_data("/nowhere/graph.json", 0, "cpu"),
        "Cannot read /nowhere/graph.json (No such file or directory); expected the JSON file that `sar "
        "partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside the folders part0, "
        "part1, ... Check the path, or divide the graph first.",
        error="PartitionError",
    ),
}
