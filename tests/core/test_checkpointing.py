"""Activation checkpointing around layers with distributed calls: the same gradients, over the same connections."""

import weakref

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import sar
from sar.comm import session
from tests.matrix import corner
from tests.parity.harness import build, check, deal, parameter_gradients, random_data, random_shares, weighted_sum
from tests.parity.programs import LAYERS, weighted
from tests.parity.scenarios import SCENARIOS


def checkpointed_layers(graph, data, layer, ends_with_the_call):
    """Two checkpoints; the last tensor that a forward saves lies in its distributed call, or after it."""
    x, w = data.leaf("x"), data.leaf("w")
    model = nn.Linear(6, 6).to(x.dtype)

    def block(h):
        made = LAYERS[layer](graph, LAYERS[layer](graph, model(h).tanh(), w), w)
        return made if ends_with_the_call else made.sin()

    return results(data, model, [block, block], x, w)


def checkpointed_attention(graph, data):
    if dist.is_initialized():
        sar.patch_dgl()
    x = data.leaf("x")
    layers = [dgl.nn.GATConv(6, 3, 2, residual=True, allow_zero_in_degree=True) for _ in range(2)]
    model = nn.ModuleList(layers).to(x.dtype)
    return results(data, model, [lambda h, layer=layer: layer(graph, h).flatten(1) for layer in layers], x, x)


def results(data, model, blocks, x, w):
    h = x
    for block in blocks:
        h = checkpoint(block, h, use_reentrant=False) if dist.is_initialized() else block(h)
    generation = session.current_group().generation if dist.is_initialized() else 0
    weighted_sum(h, data.nodes["cotangent"]).backward()
    if dist.is_initialized():
        assert session.current_group().generation == generation, "the workers had to connect again"
    gradients = {"node x.grad": x.grad, "node output": h, **parameter_gradients(model)}
    return gradients if w is x or w.grad is None else {**gradients, "edge w.grad": w.grad}


@pytest.mark.parametrize("scenario", ["isolated", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [1, corner(2), 3])
def test_gradients(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    cases = [(checkpointed_layers, (layer, last)) for layer in LAYERS for last in (False, True)]
    check(pool, parts, random_data(parts, torch.float64), [*cases, (checkpointed_attention, ())], timeout=120)


@pytest.mark.parametrize("world_size", [2])
def test_many_tiles(pool, world_size):
    """A replay that stopped in the middle of an exchange would leave messages on their way."""
    parts = SCENARIOS["isolated"](world_size)
    settings = {"comm_buffer_bytes": 400, "pipeline_depth": 2}
    cases = [(checkpointed_layers, (layer, True)) for layer in LAYERS]
    check(pool, parts, random_data(parts, torch.float64), cases, settings=settings, timeout=120)


def kept_under_a_checkpoint(mine, mode):
    """Which of the tensors that a Python message function reads and captures are still there after the forward."""
    partition, data = mine
    graph, made = build(partition, mode), []

    def block(h):
        h = h.sin()
        gate = h.mean(0).sigmoid() * 2
        made.extend(map(weakref.ref, (h, gate)))
        with graph.local_scope():
            graph.ndata["h"] = h
            graph.update_all(lambda edges: {"m": edges.src["h"] * gate}, fn.sum("m", "out"))
            return graph.ndata["out"]

    x = data.leaf("x")
    out = checkpoint(block, x, use_reentrant=False)
    kept = [each() is not None for each in made]
    out.sum().backward()
    expected, whole = data.leaf("x"), x.grad
    block(expected).sum().backward()
    assert torch.equal(whole, expected.grad)
    return kept


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("world_size", [2])
def test_what_a_python_function_captures_is_freed(pool, mode):
    assert pool.run(kept_under_a_checkpoint, mode, per_rank=random_shares(2)) == [[False, False]] * 2


def rows_saved(mine, mode):
    """Rows that autograd saves, as a checkpoint or an offloading to the CPU sees them."""
    partition, data = mine
    graph, saved = build(partition, mode), []

    def pack(tensor):
        saved.append(len(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        weighted(graph, data.leaf("x"), data.leaf("w"))
    return sum(saved)


@pytest.mark.parametrize("world_size", [2])
def test_kept_rows_are_saved_by_autograd(pool):
    """Rows that were kept any other way would stay in memory under a checkpoint."""
    parts = SCENARIOS["random"](2)
    mine = deal(parts, random_data(parts))
    lean, keeping = (pool.run(rows_saved, mode, per_rank=mine) for mode in (1, 2))
    if pool.each == 1:
        kept = [len(each.all_shard_edges[1 - rank].edges[0].unique()) for rank, each in enumerate(parts.partitions)]
    else:  # rows of the same process are not copied: what is saved are all rows of the other worker, as they lie
        kept = [end - start for start, end in reversed(parts.partitions[0].node_ranges)]
    assert [more - less for more, less in zip(keeping, lean, strict=True)] == kept
