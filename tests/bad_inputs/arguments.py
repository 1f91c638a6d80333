"""Arguments of the graph's methods, of samplers, embeddings and collectives that make no sense."""

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


CASES = {
    "DGL's self-loops": Case(
        lambda: dgl.add_self_loop(graph()),
        "MissingMethodError",
        "dgl.add_self_loop takes no distributed graph: call graph.add_self_loop() or "
        "graph.remove_self_loop(), or let `sar partition` do it.",
    ),
    "self-loops to remove, by DGL": Case(
        lambda: dgl.remove_self_loop(graph()),
        "MissingMethodError",
        "dgl.remove_self_loop takes no distributed graph: call graph.add_self_loop() or "
        "graph.remove_self_loop(), or let `sar partition` do it.",
    ),
    "a graph to reverse": Case(
        lambda: dgl.reverse(graph()),
        "MissingMethodError",
        "dgl.reverse takes no distributed graph: change the graph before it is partitioned, with DGL and "
        "sar.partition_graph, or with options of `sar partition` such as --undirected.",
    ),
    "a graph to make undirected": Case(
        lambda: dgl.to_bidirected(graph()),
        "MissingMethodError",
        "dgl.to_bidirected takes no distributed graph: change the graph before it is partitioned, with DGL "
        "and sar.partition_graph, or with options of `sar partition` such as --undirected.",
    ),
    "a graph to make homogeneous": Case(
        lambda: dgl.to_homogeneous(typed()),
        "MissingMethodError",
        "dgl.to_homogeneous takes no distributed graph: change the graph before it is partitioned, with DGL "
        "and sar.partition_graph, or with options of `sar partition` such as --undirected.",
    ),
    "a subgraph by DGL": Case(
        lambda: dgl.node_subgraph(graph(), [0]),
        "MissingMethodError",
        "dgl.node_subgraph takes no distributed graph: use sar.construct_mfgs for the graphs that some "
        "nodes' outputs need, sar.DataLoader for batches.",
    ),
    "a block by DGL": Case(
        lambda: dgl.to_block(graph()),
        "MissingMethodError",
        "dgl.to_block takes no distributed graph: use sar.construct_mfgs for the graphs that some "
        "nodes' outputs need, sar.DataLoader for batches.",
    ),
    "neighbours sampled by DGL": Case(
        lambda: dgl.sampling.sample_neighbors(graph(), [0], 2),
        "MissingMethodError",
        "dgl.sampling.sample_neighbors takes no distributed graph: sar.DataLoader samples the whole graph, with "
        "sar.DistNeighborSampler and others.",
    ),
    "a walk by DGL": Case(
        lambda: dgl.sampling.random_walk(graph(), [0], length=2),
        "MissingMethodError",
        "dgl.sampling.random_walk takes no distributed graph: sar.DataLoader samples the whole graph, with "
        "sar.DistNeighborSampler and others.",
    ),
    "the ends of all edges": Case(
        lambda: graph().edges(),
        "MissingMethodError",
        "graph.edges is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all edges "
        "into this worker's nodes, with global IDs in ndata['_ID'].",
    ),
    "the ends of all edges, as DGL orders them": Case(
        lambda: graph().edges(form="uv", order="eid"),
        "MissingMethodError",
        "graph.edges is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all edges "
        "into this worker's nodes, with global IDs in ndata['_ID'].",
    ),
    "the ends of an edge": Case(
        lambda: graph().find_edges(0),
        "MissingMethodError",
        "graph.find_edges is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all "
        "edges into this worker's nodes, with global IDs in ndata['_ID'].",
    ),
    "an adjacency matrix": Case(
        lambda: graph().adj(),
        "MissingMethodError",
        "graph.adj is not there on a distributed graph: use graph.sampling_graph, a DGLGraph of all edges "
        "into this worker's nodes, with global IDs in ndata['_ID'].",
    ),
    "DGL's IDs of 32 bits": Case(
        lambda: graph().int(),
        "MissingMethodError",
        "graph.int is not there on a distributed graph: leave it out; edges are kept in one format, and IDs are int64.",
    ),
    "an attribute that no graph has": Case(
        lambda: graph().nodez,
        "MissingMethodError",
        "A distributed graph has no attribute 'nodez'.",
    ),
    "a layer of DGL that is not patched": Case(
        unpatched,
        "MissingMethodError",
        "GATConv of DGL reads graph._graph, which a distributed graph has not. Call sar.patch_dgl() where "
        "Config.patch_dgl is False or DGL was imported after the graph was made; docs/layers.md lists what runs.",
    ),
    "a mask of bytes as seeds": Case(
        lambda: batches(torch.ones(20).byte()),
        "GraphError",
        "the seeds of worker 0 are torch.uint8 of shape (20,); expected integer global IDs, (S,). Call .bool() on a "
        "mask.",
    ),
    "a mask of bytes as seeds of a type": Case(
        lambda: batches({"_N": torch.ones(20).byte()}),
        "GraphError",
        "seeds['_N'] are torch.uint8 of shape (20,); expected integer rows, (S,). Call .bool() on a mask.",
    ),
    "a mask for message flow graphs": Case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.ones(20).bool(), 2),
        "GraphError",
        "seed_nodes are torch.bool of shape (20,); expected integer global IDs, (S,). Of a mask, pass the rows by node "
        "type: {ntype: mask.nonzero().squeeze(1)}.",
    ),
    "a mask of edges": Case(
        lambda: graph().apply_edges(lambda edges: {"w": edges.data["_ID"]}, edges=torch.ones(60).bool()),
        "GraphError",
        "edges is torch.bool of shape (60,); expected local IDs, (K,) integer: of a mask, mask.nonzero().squeeze(1).",
    ),
    "a graph of nothing": Case(
        lambda: sar.construct_full_graph(None),
        "PartitionError",
        "The data of a partition is a NoneType; expected what load_dgl_partition_data returns.",
    ),
    "a graph of DGL's graph": Case(
        lambda: sar.construct_full_graph(dgl.graph(([0], [1]))),
        "PartitionError",
        "The data of a partition is a DGLGraph; expected what load_dgl_partition_data returns.",
    ),
    "an edge type that is not there": Case(
        lambda: graph()["likes"],
        "FieldError",
        "'likes' is not an edge type of this graph; the edge types are [('_N', '_E', '_N')].",
    ),
    "a node type that is not there": Case(
        lambda: typed().num_nodes("car"),
        "FieldError",
        "There is no node type 'car' here; expected one of ['item', 'user'].",
    ),
    "no edge type where there are several": Case(
        lambda: typed().update_all(fn.copy_u("x", "m"), fn.sum("m", "out")),
        "GraphError",
        "The graph has 3 edge types; name one of [('item', 'bought by', 'user'), ('user', 'buys', 'item'), "
        "('user', 'follows', 'user')].",
    ),
    "no node type where there are several": Case(
        lambda: sar.nn.DistEmbedding(typed(), 3),
        "GraphError",
        "The graph has several node types; name one of ['item', 'user'].",
    ),
    "a cross reducer that is not there": Case(
        lambda: across("median"),
        "GraphError",
        "Unknown cross reducer 'median'; expected sum, mean, max, min, stack, or a function.",
    ),
    "the in-degree of a node that is not there": Case(
        lambda: graph().in_degrees([99]),
        "GraphError",
        "There is no node 99 here; expected local IDs from 0 to 19.",
    ),
    "the out-degree of a negative node": Case(
        lambda: graph().out_degrees(-5),
        "GraphError",
        "There is no node -5 here; expected local IDs from 0 to 19.",
    ),
    "features by a name that is not there": Case(
        lambda: sar.suffix_key_lookup({"a/feat": 1, "b/label": 2}, "eat"),
        "FieldError",
        "There is no feature 'eat'; expected one of ['a/feat', 'b/label'].",
    ),
    "features by a name that two types have": Case(
        lambda: sar.suffix_key_lookup({"a/feat": 1, "b/feat": 2}, "feat"),
        "FieldError",
        "Several features are called 'feat': ['a/feat', 'b/feat']. Name one of them with its type.",
    ),
    "message flow graphs without layers": Case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.arange(3), 0),
        "GraphError",
        "construct_mfgs got n_layers=0; expected at least 1.",
    ),
    "message flow graphs for foreign nodes": Case(
        lambda: sar.construct_mfgs(parts_of([N]).partitions[0], torch.tensor([55]), 2),
        "GraphError",
        "1 of seed_nodes, such as 55, are not of this worker's partition, which has the global IDs [0, 20) there;"
        " pass global IDs from there.",
    ),
    "another graph to convert": Case(
        lambda: sar.convert_dist_graph(5),
        "GraphError",
        "convert_dist_graph was given a int; expected a DistGraph of DGL.",
    ),
    "a seed that is not there": Case(
        lambda: batches(torch.tensor([99])),
        "GraphError",
        "1 of the seeds of worker 0, such as 99, are not of this worker's partition, which has the global IDs [0,"
        " 20) there; pass global IDs from there.",
    ),
    "a negative seed": Case(
        lambda: batches(torch.tensor([-1])),
        "GraphError",
        "1 of the seeds of worker 0, such as -1, are not of this worker's partition, which has the global IDs [0,"
        " 20) there; pass global IDs from there.",
    ),
    "a seed twice": Case(
        lambda: batches(torch.tensor([1, 1])),
        "GraphError",
        "1 of the seeds of worker 0 are given twice; pass each once.",
    ),
    "seeds that are no integers": Case(
        lambda: batches(torch.tensor([1.0])),
        "GraphError",
        "the seeds of worker 0 are torch.float32 of shape (1,); expected integer global IDs, (S,).",
    ),
    "seeds in two dimensions": Case(
        lambda: batches(torch.ones(2, 2).long()),
        "GraphError",
        "the seeds of worker 0 are torch.int64 of shape (2, 2); expected integer global IDs, (S,).",
    ),
    "a mask of another length": Case(
        lambda: batches(torch.ones(7).bool()),
        "GraphError",
        "seeds is a mask of (7,); expected one over this worker's nodes, (20,).",
    ),
    "seeds to share out that are not there": Case(
        lambda: sar.split_seeds(graph(), torch.tensor([77])),
        "GraphError",
        "1 of the seeds of worker 0, such as 77, are not of this worker's partition, which has the global IDs [0,"
        " 20) there; pass global IDs from there.",
    ),
    "batches without seeds in them": Case(
        lambda: batches(torch.arange(4), batch_size=0),
        "ConfigError",
        "batch_size is 0; expected an integer of at least 1.",
    ),
    "batches of half a seed": Case(
        lambda: batches(torch.arange(4), batch_size=2.5),
        "ConfigError",
        "batch_size is 2.5; expected an integer of at least 1.",
    ),
    "less than no batch ahead": Case(
        lambda: batches(torch.arange(4), num_workers=-1),
        "ConfigError",
        "num_workers is -1; expected at least 0.",
    ),
    "one fan-out without a list": Case(
        lambda: sample(5),
        "ConfigError",
        "fanouts is 5; expected a list with a number for each layer, such as [15, 10].",
    ),
    "a negative fan-out": Case(
        lambda: sample([-2]),
        "ConfigError",
        "fanouts[0] has -2; expected an integer of at least 0, or -1 for all.",
    ),
    "a fan-out that is no integer": Case(
        lambda: sample([1.5]),
        "ConfigError",
        "fanouts[0] has 1.5; expected an integer of at least 0, or -1 for all.",
    ),
    "a fan-out for an edge type that is not there": Case(
        lambda: sample([{"likes": 1}]),
        "FieldError",
        "'likes' is not an edge type of this graph; the edge types are [('_N', '_E', '_N')].",
    ),
    "weights that are not there": Case(
        lambda: sample([2], prob="w"),
        "FieldError",
        "prob='w' is not an edge field of the graph; expected one of ['_ID', 'orig_id'].",
    ),
    "input features of too few nodes": Case(
        lambda: sample([2], input_node_features={"x": torch.ones(3, 1)}),
        "FieldError",
        "input_node_features['x'] has shape (3, 1); expected a row for each of this worker's 20 nodes of type '_N'.",
    ),
    "input features that are a list": Case(
        lambda: sample([2], input_node_features={"x": [1] * N}),
        "ConfigError",
        "input_node_features['x'] is a list; expected a tensor.",
    ),
    "input features without a name": Case(
        lambda: sample([2], input_node_features=torch.ones(N, 2)),
        "ConfigError",
        "input_node_features is a Tensor; expected a dictionary from name to tensor.",
    ),
    "a cache of negative size": Case(
        lambda: sample([2], feature_cache_bytes=-1),
        "ConfigError",
        "feature_cache_bytes is -1; expected at least 0.",
    ),
    "an embedding of no dimension": Case(
        lambda: embedding(0),
        "ConfigError",
        "embedding_dim is 0; expected an integer of at least 1.",
    ),
    "an embedding of a type that is not there": Case(
        lambda: sar.nn.DistEmbedding(typed(), 3, "car"),
        "FieldError",
        "There is no node type 'car' here; expected one of ['item', 'user'].",
    ),
    "initial rows of another shape": Case(
        lambda: embedding(3, init_func=lambda shape, dtype: torch.ones(2, 2)),
        "GraphError",
        "init_func made rows of (2, 2); expected (20, 3).",
    ),
    "a lookup of a node that is not there": Case(
        lambda: embedding(3)(torch.tensor([99])),
        "GraphError",
        "1 of the IDs, such as 99, are not of the graph's nodes; expected global IDs from 0 to 19.",
    ),
    "a lookup by a number that is no ID": Case(
        lambda: embedding(3)(torch.tensor([1.0])),
        "GraphError",
        "The nodes are torch.float32 (1,); expected global IDs, (K,) int64.",
    ),
    "parameters for an optimizer of embeddings": Case(
        lambda: sar.nn.SparseAdam([torch.nn.Parameter(torch.ones(2))]),
        "ConfigError",
        "SparseAdam got ['Parameter']; expected a list of DistEmbedding. Other parameters belong in an optimizer "
        "of torch.",
    ),
    "a negative learning rate": Case(
        lambda: sar.nn.SparseAdam([embedding(3)], lr=-1),
        "ConfigError",
        "lr is -1; expected a number of at least 0.",
    ),
    "a moment that never decays": Case(
        lambda: sar.nn.SparseAdam([embedding(3)], betas=(1.0, 0.9)),
        "ConfigError",
        "betas is (1.0, 0.9); expected two numbers from 0 to below 1.",
    ),
    "no tensor for every worker": Case(
        lambda: sar.comm.all_to_all([], []),
        "ConfigError",
        "all_to_all got 0 tensors to receive into and 0 to send; expected one of each for all 1 workers.",
    ),
    "a worker that is not there": Case(
        lambda: sar.comm.exchange_single_tensor(3, 0, torch.ones(1), torch.ones(1)),
        "ConfigError",
        "exchange_single_tensor names 3 and 0; expected ranks below 1.",
    ),
    "another rank than that of the group": Case(
        lambda: sar.initialize_comms(5, 1, "127.0.0.1"),
        "ConfigError",
        "initialize_comms asks for rank 5, but the existing process group has 0.",
    ),
    "another number of workers than the group's": Case(
        lambda: sar.initialize_comms(0, 2, "127.0.0.1"),
        "ConfigError",
        "initialize_comms asks for world size 2, but the existing process group has 1.",
    ),
    "a partition that is not there": Case(
        lambda: sar.load_dgl_partition_data("/nowhere/graph.json", 0, "cpu"),
        "PartitionError",
        "Cannot read /nowhere/graph.json (No such file or directory); expected the JSON file that "
        "`sar partition`, sar.partition_graph or dgl.distributed.partition_graph writes beside the folders part0, "
        "part1, ... Check the path, or divide the graph first.",
    ),
}
