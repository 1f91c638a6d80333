"""One-pass attention across workers against softmax and sum by the edge; memory that it may not take."""

from itertools import permutations
from unittest.mock import patch

import dgl.nn
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import leaky_relu
from torch.utils._python_dispatch import TorchDispatchMode

import sar
from sar.core.passing.attention import SEED_STEP, Recompute, _AttentionCall, attention
from sar.kernels.ops import Attention, Score
from sar.kernels.torch import dropout_factors
from tests.core.attempts import catch
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import MODES, assert_close, build, deal, merge, random_data, random_shares
from tests.parity.scenarios import SCENARIOS, scattered

HEADS, DIM, DROPOUT, SLOPE, SEED = 2, 3, 0.4, 0.2, 7


def parameters(dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in "ab"]


def leaves(data):
    x, y, cotangent = (data.nodes[k][:, : HEADS * DIM].reshape(-1, HEADS, DIM) for k in ("x", "y", "cotangent"))
    return (
        x.clone().requires_grad_(),
        y.clone().requires_grad_(),
        data.edges["w"][:, 0].clone().requires_grad_(),
        cotangent,
    )


def gradients_of(out, cotangent, x, y, weight, attn, attn_dst):
    (out * cotangent).sum().backward()
    results = {"node out": out.detach(), "node x": x.grad, "edge weight": weight.grad}
    results |= {"node y": y.grad} if y is not x else {}
    return results | {f"sum {k}": p.grad for k, p in (("attn", attn), ("attn_dst", attn_dst)) if p.grad is not None}


def on_worker(mine, score, same, mode):
    """What a worker gets; `same` uses one tensor for sources and destinations."""
    partition, data = mine
    graph = build(partition, mode)
    x, y, weight, cotangent = leaves(data)
    y = x if same else y
    attn, attn_dst = parameters(x.dtype)
    torch.manual_seed(SEED)
    out = attention(
        graph.call_context(), score, x, y,
        attn=None if score is Score.DOT else attn, attn_dst=attn_dst if score is Score.ADDITIVE else None,
        factor=SLOPE, dropout=DROPOUT, edge_weight=weight,
    )  # fmt: skip
    return gradients_of(out, cotangent, x, y, weight, attn, attn_dst)


def on_one_machine(parts, data, score, same):
    """The same by the edge, with the fates that the workers' edges have."""
    x, y, weight, cotangent = leaves(data)
    y = x if same else y
    attn, attn_dst = parameters(x.dtype)
    src, dst = parts.src, parts.dst
    if score is Score.ADDITIVE:
        logits = leaky_relu((x * attn).sum(-1)[src] + (y * attn_dst).sum(-1)[dst], SLOPE)
    elif score is Score.DYNAMIC:
        logits = (leaky_relu(x[src] + y[dst], SLOPE) * attn).sum(-1)
    else:
        logits = SLOPE * (x[src] * y[dst]).sum(-1)
    alpha = logits * 0
    for d in dst.unique():
        alpha = alpha + torch.where((dst == d).unsqueeze(1), logits, -torch.inf).softmax(0)
    torch.manual_seed(SEED)
    seed = int(torch.randint(2**62, ()))
    edges = parts.split_edges(torch.arange(len(src)))
    heads, dtype = alpha.shape[1], alpha.dtype
    seeds = [(seed + rank * SEED_STEP) % 2**64 for rank in range(len(edges))]
    kept = [
        dropout_factors(Attention(score, SLOPE, DROPOUT, own_seed), torch.arange(len(own)), heads, dtype)
        for own_seed, own in zip(seeds, edges, strict=True)
    ]
    alpha = alpha * torch.cat(kept) * weight.unsqueeze(1)
    out = torch.zeros_like(x).index_add(0, dst, alpha.unsqueeze(2) * x[src])
    return gradients_of(out, cotangent, x, y, weight, attn, attn_dst)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("score", Score)
def test_scores_dropout_and_edge_weights(pool, world_size, score):
    """Outputs and all gradients, in all modes, for one tensor on both sides and for two."""
    for scenario in ("random", "isolated", "first worker without nodes", "no edges"):
        parts = SCENARIOS[scenario](world_size)
        data = random_data(parts, torch.float64)
        for same in (False, True):
            expected = on_one_machine(parts, data, score, same)
            for mode in MODES:
                results = merge(pool.run(on_worker, score, same, mode, per_rank=deal(parts, data)))
                assert results.keys() == expected.keys()
                for name, value in expected.items():
                    assert_close(results[name], value)


def every_score(mine):
    return [on_worker(mine, score, False, 1) for score in Score]


def sized(parts, powers):
    """Integers as features, times 2 to the power of the worker that has the row."""
    data = random_data(parts, torch.float64)
    factors = torch.tensor([2.0**power for power in powers]).repeat_interleave(torch.tensor(parts.node_counts))
    data.nodes["x"] = (4 * data.nodes["x"]).round() * factors.unsqueeze(1)
    data.nodes["y"] = (4 * data.nodes["y"]).round() * 2.0 ** (max(powers) // 2)
    return data


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_greatest_scores_on_any_worker(pool, world_size):
    """Features of size 1 to 16,384, in every order of the workers that have them."""
    parts = partition_in_memory(random_graph(1, 30, 6000), scattered(30, world_size), world_size)
    for powers in permutations((0, 7, 14), world_size):
        data = sized(parts, powers)
        found = pool.run(every_score, per_rank=deal(parts, data))
        most = float(data.nodes["x"].abs().max() * data.nodes["y"].abs().max())
        for score, results in zip(Score, zip(*found, strict=True), strict=True):
            expected, results = on_one_machine(parts, data, score, False), merge(results)
            assert_close(results["node out"], expected["node out"])
            for name, value in expected.items():  # gradients are differences of numbers of about this size
                assert_close(results[name], value, 1e-12, most)


def test_workers_draw_independently():
    """With the same seed on all workers, no two have the same dropout, not even shifted."""
    attentions = [Attention(Score.DOT, 1.0, DROPOUT, (SEED + rank * SEED_STEP) % 2**64) for rank in (0, 1)]
    one, other = (dropout_factors(how, torch.arange(20_000), 1, torch.float32).flatten() > 0 for how in attentions)
    for shift in range(-3, 4):
        together = (one & other.roll(shift)).double().mean()
        assert abs(together - (1 - DROPOUT) ** 2) < 0.02  # equal ones would be 1 - DROPOUT


class Sizes(TorchDispatchMode):
    """Notes the largest floating-point tensor that any operation makes; integers are the structure of the graph."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return made


def largest_tensors(mine, one_pass):
    """Elements of the largest tensor that a layer's second forward and backward make."""
    partition, data = mine
    sar.patch_dgl()
    graph = build(partition, 1)
    largest = []
    for layer in (dgl.nn.GATConv(6, 4, 2, attn_drop=0.5), dgl.nn.GATv2Conv(6, 4, 2), dgl.nn.DotGatConv(6, 4, 2)):
        layer._allow_zero_in_degree = True
        for _ in range(2):
            x = data.leaf("x")
            with Sizes() as sizes:
                out = layer(graph, x) if one_pass else layer(graph, x, get_attention=True)[0]
                out.sum().backward()
        largest.append(sizes.largest)
    return largest


@pytest.mark.parametrize("world_size", [2])
def test_nothing_has_the_size_of_the_edges(pool):
    """30 nodes, 6000 edges; with the weights asked for, there are tensors of that size, which shows that it is seen."""
    parts = partition_in_memory(random_graph(1, 30, 6000), scattered(30, 2), 2)
    mine = deal(parts, random_data(parts))
    for largest in pool.run(largest_tensors, True, per_rank=mine):
        assert max(largest) < 1000
    for largest in pool.run(largest_tensors, False, per_rank=mine):
        assert min(largest) > 2000


def result_during_backward(mine, retain_graph):
    """Whether the result's memory is still there when the backward projects again, and the gradient."""
    partition, data = mine
    leaf, _, _, cotangent = leaves(data)
    found = []

    def project(values):
        found.append("result" in memory and not memory["result"].expired())
        return values * 2

    memory = {}
    attn, attn_dst = parameters(leaf.dtype)
    x = leaf * 2
    out = attention(
        build(partition, 1).call_context(), Score.ADDITIVE, x, x,
        attn=attn, attn_dst=attn_dst, factor=SLOPE, recompute=Recompute(project, (leaf,)),
    )  # fmt: skip
    memory["result"] = StorageWeakRef(out.untyped_storage())
    total = (out * cotangent).sum()
    del out, x
    total.backward(retain_graph=retain_graph)
    if retain_graph:
        leaf.grad = None
        total.backward()
    return found, leaf.grad


@pytest.mark.processes("what virtual workers save leaves memory")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_result_is_let_go_of(pool, world_size):
    """Before the backward makes anything of its size; not where the graph is retained."""
    mine = random_shares(world_size)
    once = pool.run(result_during_backward, False, per_rank=mine)
    twice = pool.run(result_during_backward, True, per_rank=mine)
    assert [found for found, _ in once] == [[False]] * world_size
    assert [found for found, _ in twice] == [[True, False]] * world_size
    for (_, grad), (_, again) in zip(once, twice, strict=True):
        assert torch.equal(grad, again)


def wrong_operands(mine):
    partition, data = mine
    context = build(partition, 1).call_context()
    x = data.nodes["x"].reshape(-1, 2, 3)
    return [
        catch(lambda: attention(context, Score.DOT, x[1:], x, factor=1.0)),
        catch(lambda: attention(context, Score.DOT, x, x[:, :1], factor=1.0)),
        catch(lambda: attention(context, Score.DOT, x, x, factor=1.0, edge_weight=data.edges["w"])),
        catch(lambda: attention(context, Score.DYNAMIC, x, x, factor=0.2, attn=x[0, :1])),
        catch(lambda: attention(context, Score.ADDITIVE, x, x, factor=0.2, attn=x[0], attn_dst=x[0, 0])),
    ]


@pytest.mark.parametrize("world_size", [1])
def test_operands_that_do_not_fit(pool, world_size):
    """They are refused before anything is computed."""
    (errors,) = pool.run(wrong_operands, per_rank=random_shares(world_size))
    assert [error.kind for error in errors] == ["GraphError"] * 5


def rows_kept_in_mode_2(mine):
    """Rows of other workers that a call keeps for its backward, in evaluation and in training."""
    kept, forward = [], _AttentionCall.forward

    def noting(call, *inputs):
        output = forward(call, *inputs)
        kept.append(sum(len(rows[0]) for rows in call.kept.values()))
        return output

    graph, layer = build(mine[0], 2), dgl.nn.GATConv(6, DIM, HEADS, allow_zero_in_degree=True)
    with patch.object(_AttentionCall, "forward", noting):
        with torch.no_grad():
            layer(graph, mine[1].nodes["x"])
        layer(graph, mine[1].nodes["x"])
    return kept


@pytest.mark.parametrize("world_size", [2])
def test_evaluation_keeps_no_rows(pool, world_size):
    """torch says of inputs that need a gradient that they do, under `no_grad`, too."""
    for in_evaluation, in_training in pool.run(rows_kept_in_mode_2, per_rank=random_shares(world_size)):
        assert in_evaluation == 0
        assert in_training > 0
