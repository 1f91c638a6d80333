"""Arguments of the graph's methods, of samplers, embeddings and collectives that make no sense."""

import dgl
import dgl.function as fn
import torch

import sar
from tests.bad_inputs.fields import N, graph, partition, typed


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


def number(edges):
    return {"w": edges.data["_ID"]}


ONE = torch.ones(1)
CASES = {
    "ConfigError": {
        "The sampler is": lambda: sar.DataLoader(graph(), torch.arange(3), dgl.dataloading.NeighborSampler([2])),
        "The graph is 'data'": lambda: sar.DataLoader("data", torch.arange(3), sar.DistNeighborSampler([2])),
        "batch_size is 0": lambda: batches(torch.arange(4), batch_size=0),
        "batch_size is 2.5": lambda: batches(torch.arange(4), batch_size=2.5),
        "num_workers is -1": lambda: batches(torch.arange(4), num_workers=-1),
        "fanouts is 5": lambda: sample(5),
        "fanouts[0] has -2": lambda: sample([-2]),
        "fanouts[0] has 1.5": lambda: sample([1.5]),
        "input_node_features['x'] is a list": lambda: sample([2], input_node_features={"x": [1] * N}),
        "input_node_features is a Tensor": lambda: sample([2], input_node_features=torch.ones(N, 2)),
        "embedding_dim is 0": lambda: embedding(0),
        "SparseAdam got ['Parameter']": lambda: sar.nn.SparseAdam([torch.nn.Parameter(torch.ones(2))]),
        "lr is -1; expected a number of at least 0": lambda: sar.nn.SparseAdam([embedding(3)], lr=-1),
        "betas is (1.0, 0.9); expected two numbers": lambda: sar.nn.SparseAdam([embedding(3)], betas=(1.0, 0.9)),
        "all_to_all got 0 tensors to receive into": lambda: sar.comm.all_to_all([], []),
        "exchange_single_tensor names 3 and 0": lambda: sar.comm.exchange_single_tensor(3, 0, ONE, ONE),
        "initialize_comms asks for rank 5, but the": lambda: sar.initialize_comms(5, 1, "127.0.0.1"),
        "initialize_comms asks for world size 2, but": lambda: sar.initialize_comms(0, 2, "127.0.0.1"),
    },
    "MissingMethodError": {
        "dgl.add_self_loop takes no distributed": lambda: dgl.add_self_loop(graph()),
        "dgl.to_homogeneous takes no distributed": lambda: dgl.to_homogeneous(typed()),
        "dgl.sampling.sample_neighbors takes no": lambda: dgl.sampling.sample_neighbors(graph(), [0], 2),
        "graph.edges is not there on a distributed": lambda: graph().edges(),
        "graph.int is not there on a distributed": lambda: graph().int(),
        "A distributed graph has no attribute": lambda: graph().nodez,
        "GATConv of DGL reads graph._graph, which a": unpatched,
    },
    "GraphError": {
        "the seeds of worker 0 are torch.uint8 of": lambda: batches(torch.ones(20).byte()),
        "seeds['_N'] are torch.uint8 of shape": lambda: batches({"_N": torch.ones(20).byte()}),
        "seed_nodes are torch.bool of shape": lambda: sar.construct_mfgs(partition(), torch.ones(20).bool(), 2),
        "edges is torch.bool of shape": lambda: graph().apply_edges(number, edges=torch.ones(60).bool()),
        "The graph has 3 edge types": lambda: typed().update_all(fn.copy_u("x", "m"), fn.sum("m", "out")),
        "The graph has several node types": lambda: sar.nn.DistEmbedding(typed(), 3),
        "Unknown cross reducer 'median'": lambda: across("median"),
        "There is no node 99 here": lambda: graph().in_degrees([99]),
        "There is no node -5 here": lambda: graph().out_degrees(-5),
        "construct_mfgs got n_layers=0": lambda: sar.construct_mfgs(partition(), torch.arange(3), 0),
        "1 of seed_nodes, such as 55, are not of": lambda: sar.construct_mfgs(partition(), torch.tensor([55]), 2),
        "convert_dist_graph was given a int": lambda: sar.convert_dist_graph(5),
        "1 of the seeds of worker 0, such as 99, are": lambda: batches(torch.tensor([99])),
        "1 of the seeds of worker 0, such as -1, are": lambda: batches(torch.tensor([-1])),
        "1 of the seeds of worker 0 are given twice": lambda: batches(torch.tensor([1, 1])),
        "the seeds of worker 0 are torch.float32 of": lambda: batches(torch.tensor([1.0])),
        "the seeds of worker 0 are torch.int64 of": lambda: batches(torch.ones(2, 2).long()),
        "seeds is a mask of": lambda: batches(torch.ones(7).bool()),
        "1 of the seeds of worker 0, such as 77, are": lambda: sar.split_seeds(graph(), torch.tensor([77])),
        "init_func made rows of": lambda: embedding(3, init_func=lambda shape, dtype: torch.ones(2, 2)),
        "1 of the IDs, such as 99, are not of the": lambda: embedding(3)(torch.tensor([99])),
        "The nodes are torch.float32": lambda: embedding(3)(torch.tensor([1.0])),
    },
    "PartitionError": {
        "The data of a partition is a NoneType": lambda: sar.construct_full_graph(None),
        "The data of a partition is a DGLGraph": lambda: sar.construct_full_graph(dgl.graph(([0], [1]))),
        "Cannot read /nowhere/graph.json": lambda: sar.load_dgl_partition_data("/nowhere/graph.json", 0, "cpu"),
    },
    "FieldError": {
        "'likes' is not an edge type of this graph": lambda: graph()["likes"],
        "There is no node type 'car' here": lambda: typed().num_nodes("car"),
        "There is no feature 'eat'": lambda: sar.suffix_key_lookup({"a/feat": 1, "b/label": 2}, "eat"),
        "Several features are called 'feat'": lambda: sar.suffix_key_lookup({"a/feat": 1, "b/feat": 2}, "feat"),
        "'likes' is not an edge type": lambda: sample([{"likes": 1}]),
        "prob='w' is not an edge field of the graph": lambda: sample([2], prob="w"),
        "input_node_features['x'] has shape": lambda: sample([2], input_node_features={"x": torch.ones(3, 1)}),
    },
}
