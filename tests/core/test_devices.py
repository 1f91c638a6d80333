"""Workers on a device that is not the CPU: every tensor stays where the graph is, and the numbers are the CPU's."""

import os
import shutil
from pathlib import Path
from tempfile import gettempdir

import dgl
import dgl.function as fn
import dgl.nn
import pytest
import torch

import sar
from tests import pretend_gpu
from tests.gpu.places import PLACES, Place
from tests.parity.harness import (
    assert_close,
    build,
    parameter_gradients,
    random_shares,
    weighted_sum,
)


def aggregated(graph, data, message, reducer):
    """The result of a built-in message function, and the gradients of its operands."""
    x, w = data.leaf("x"), data.leaf("w")
    graph.ndata["x"], graph.edata["w"] = x, w
    graph.update_all(message("x", "m") if message is fn.copy_u else message("x", "w", "m"), reducer("m", "out"))
    out = graph.ndata["out"]
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return [out, x.grad, *([] if w.grad is None else [w.grad])]


def builtin_messages(graph, data):
    return [
        value
        for reducer in (fn.sum, fn.mean, fn.max, fn.min)
        for message in (fn.copy_u, fn.u_mul_e)
        for value in aggregated(graph, data, message, reducer)
    ]


def python_messages(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    graph.ndata["x"], graph.edata["w"] = x, w
    found = []
    for reducer in (fn.sum("m", "out"), fn.max("m", "out"), lambda nodes: {"out": nodes.mailbox["m"].mean(1)}):
        graph.update_all(lambda edges: {"m": (edges.src["x"] - edges.dst["x"]) * edges.data["w"]}, reducer)
        out = graph.ndata["out"]
        weighted_sum(out, data.nodes["cotangent"]).backward()
        found += [out, x.grad.clone(), w.grad.clone()]
    return found


def layers(graph, data, *modules):
    """Results of a model with dropout off, gradients of its input and its parameters."""
    torch.manual_seed(0)
    found = []
    for make in modules:
        with torch.device("cpu"):  # whose random numbers a GPU does not have
            layer = make()
        layer, x = layer.to(data.nodes["x"].device), data.leaf("x")
        out = layer(graph, x)
        weighted_sum(out.flatten(1), data.nodes["cotangent"]).backward()
        found += [out, x.grad, *parameter_gradients(layer).values()]
    return found


def attention(graph, data):
    sar.patch_dgl()
    found = layers(
        graph,
        data,
        lambda: dgl.nn.GATConv(6, 2, 2, attn_drop=0.4, allow_zero_in_degree=True),
        lambda: dgl.nn.GATv2Conv(6, 2, 2, allow_zero_in_degree=True),
        lambda: dgl.nn.DotGatConv(6, 2, 2, allow_zero_in_degree=True),
    )
    logits = data.leaf("e")
    for norm_by in ("dst", "src"):
        weights = sar.edge_softmax(graph, logits, norm_by=norm_by)
        weighted_sum(weights, data.edges["edge cotangent"]).backward()
        found += [weights, logits.grad.clone()]
    return [*found, sar.edge_softmax(graph, data.edges["e"][:3], eids=torch.tensor([2, 0, 1], device="cpu"))]


def saved(graph, data):
    """Rows of nodes and their optimizer, saved and loaded by others, and a model, whose file is of the CPU."""
    folder = Path(gettempdir()) / f"on-a-device-{sar.all_max(os.getpid())}"
    model, found = torch.nn.Linear(6, 2, device="cpu").to(graph.device), []
    for _ in range(2):
        emb = sar.nn.DistEmbedding(graph, 6)
        optimizer = sar.nn.SparseAdam([emb])
        if found:
            sar.load_checkpoint(folder, optimizer=optimizer, embeddings=emb)
        emb(graph.node_ids()[::2].repeat(2)).tanh().sum().backward()
        optimizer.step()
        if not found:
            sar.save_checkpoint(folder, optimizer=optimizer, embeddings=emb)
            sar.save_model(folder / "model.pt", model)
        found.append(emb.weight)
    plain = torch.load(folder / "model.pt", weights_only=True)["weight"]
    sar.all_sum(0)
    if sar.rank() == 0:
        shutil.rmtree(folder)
    return [*found, plain.to(graph.device)]


def samplers(graph, data):
    """What they read of a graph: of all kinds, with their weights."""
    graph.edata["w"] = data.edges["w"]
    seeds = graph.node_ids()[:1]
    batches = sar.DistNeighborSampler([2]).sample(graph, seeds)
    edges = sar.split_edges(graph, {graph.canonical_etypes[0]: torch.arange(graph.num_edges())[::2]})
    pairs = sar.EdgePredictionSampler(sar.DistNeighborSampler([2]), reverse_eids=sar.reverse_edges(graph))
    (inputs, positive, blocks) = pairs.sample(graph, graph.edata[dgl.EID][::2])
    (subgraph,) = sar.train.local_subgraphs(graph, data.partition)
    seeds = sar.split_seeds(graph, torch.ones(graph.num_nodes(), dtype=torch.bool))
    loader = sar.DataLoader(
        graph, graph.node_ids(), sar.DistNeighborSampler([2]), batch_size=7, precompute_optimized_batches=True
    )
    ends = [end for batch in (*batches, positive, *blocks, subgraph) for end in batch.edges()]
    weights = [each.edata["w"] for each in (*batches, subgraph)]
    return [*ends, inputs, edges, seeds, *weights, *(block.srcdata[dgl.NID] for (block,) in loader)]


def pairs(graph, data):
    """Scores of pairs, in their order, and gradients."""
    x, ids = data.leaf("x"), graph.node_ids()
    made = sar.pair_graph(graph, ids.flip(0), ids.roll(3) // 2)
    made.ndata["x"] = x
    made.apply_edges(fn.u_dot_v("x", "x", "score"))
    scores = made.in_given_order(made.edata["score"])
    weighted_sum(scores, scores.detach().cos()).backward()
    numbers = made.in_given_order(torch.arange(made.num_edges(), device="cpu"))
    return [scores, x.grad, made.in_degrees(), numbers.to(graph.device)]


def the_graph(graph, data):
    """Structure, degrees and changed structure."""
    looped = graph.remove_self_loop().add_self_loop()
    with graph.local_scope():
        graph.apply_edges(fn.u_sub_v("y", "y", "all"))
        graph.apply_edges(fn.copy_u("y", "some"), edges=torch.tensor([0, 2]))
        edges = [graph.edata["all"], graph.edata["some"]]
    back = looped.to("cpu")
    back.ndata["y"] = graph.ndata["y"].cpu()
    back.apply_edges(fn.u_add_v("y", "y", "sums"))
    return [
        back.edata["sums"].to(graph.device),
        graph.in_degrees(),
        graph.out_degrees(),
        looped.in_degrees(),
        graph.in_degrees(torch.tensor([1, 2])),
        *edges,
    ]


def training_helpers(graph, data):
    """Loss, sums over workers, and the best model brought back; metrics are numbers."""
    x = data.leaf("x")
    one = torch.arange(len(x), device=x.device) % 7 - 1
    several = (one.unsqueeze(1) + torch.arange(6, device=x.device)) % 2
    stop, model, found = sar.EarlyStopping(), torch.nn.Linear(6, 6, device="cpu").to(x.device), []
    for labels in (one, several):
        task = sar.Task(labels, {"train": one > 0, "val": one < 4})
        loss = task.loss(model(x))
        loss.backward()
        value = task.metrics(model(x))["val"]["f1_macro"]
        found += [loss, x.grad.clone(), sar.all_sum(loss), sar.all_max(one[:6] == 2), sar.all_max(x[:6])]
        found.append(torch.tensor([value, task.accuracy(x, "train")]).to(x.device))
        stop.step(value, model)
    area = torch.tensor([sar.Task(one.clamp(max=1), {"val": one < 4}).roc_auc(x[:, :2], "val"), task.roc_auc(x, "val")])
    stop.load_best(model)
    rank, size, arrived = sar.rank(), sar.world_size(), torch.empty_like(x[:2])
    sar.comm.exchange_single_tensor((rank - 1) % size, (rank + 1) % size, arrived, x.detach()[:2].clone())
    return [*found, model.weight, area.to(x.device), arrived]


PROGRAMS = [the_graph, builtin_messages, python_messages, attention, training_helpers, pairs]


def run(mine, program, device, how):
    """What a program returns on the CPU, and on the device: each result, and whether it is there."""
    partition, data = mine
    data.partition = partition
    results = []
    with pretend_gpu.in_place_of(device):
        for target in ("cpu", device):
            torch.manual_seed(1)
            there = data.to(target)
            if how == "made there":
                torch.set_default_device(target)  # until the case ends
                graph = build(there.partition, 1)
            else:
                graph = build(partition, 1)
                graph.ndata["y"] = data.nodes["y"]
                graph = graph.to(target)
                there.partition = partition
            graph.ndata["y"] = there.nodes["y"]
            found = program(graph, there)
            torch.set_default_device(None)
            results.append(([value.detach().cpu() for value in found], [value.device.type for value in found]))
    return results


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("program", [*PROGRAMS, saved, samplers], ids=lambda program: program.__name__)
@pytest.mark.parametrize("place", PLACES, indirect=True, ids=str)
def test_on_another_device(place: Place, program):
    mine = random_shares(place.world_size)
    first = place.device if place.backend == "nccl" else f"{place.device}:0"  # with which each has its own
    for how, device in (("made there", first), ("moved", place.device)):
        for (expected, _), (found, places) in place.pool.run(run, program, device, how, per_rank=mine):
            for value, wanted in zip(found, expected, strict=True):
                assert_close(value, wanted) if value.is_floating_point() else torch.testing.assert_close(value, wanted)
            if program is not samplers:  # whose blocks are on the CPU
                assert set(places) == {place.device}
