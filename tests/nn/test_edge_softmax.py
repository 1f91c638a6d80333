"""`edge_softmax` over in-edges, against DGL, with gradients."""

import dgl.nn.functional
import pytest
import torch

import sar
from tests.core.attempts import fail_on_all_ranks
from tests.parity.harness import check, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS


def softmax(graph, data, shape, scale, via):
    logits = (scale * data.edges["e"][:, : torch.Size(shape).numel()]).reshape(-1, *shape).requires_grad_()
    if isinstance(graph, sar.GraphShardManager) and via == "sar":
        scores = sar.edge_softmax(graph, logits)
    else:
        if isinstance(graph, sar.GraphShardManager):
            sar.patch_dgl()
        scores = dgl.nn.functional.edge_softmax(graph, logits)
    weighted_sum(scores, data.edges["edge cotangent"]).backward()
    return {"edge scores": scores, "edge logits.grad": logits.grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_edge_softmax(pool, world_size, scenario, dtype):
    """Logits of size 300 overflow where the maximum is not taken off first."""
    parts = SCENARIOS[scenario](world_size)
    shapes = [(), (1,), (3,), (2, 3), (3, 1)]
    cases = [(softmax, (shape, 1.0, "sar")) for shape in shapes]
    cases += [(softmax, ((3,), 300.0, "sar")), (softmax, ((3,), 1.0, "dgl"))]
    check(pool, parts, random_data(parts, dtype), cases, modes=(1, 3))


def softmax_of_some_edges(graph, data):
    chosen = data.edges["chosen"].nonzero().squeeze(1)
    logits = data.edges["e"][chosen].clone().requires_grad_()
    if isinstance(graph, sar.GraphShardManager):
        scores = sar.edge_softmax(graph, logits, chosen, norm_by="dst")
    else:
        scores = dgl.nn.functional.edge_softmax(graph, logits, eids=chosen)
    weighted_sum(scores, data.edges["edge cotangent"][chosen]).backward()
    return {"edge scores": scores, "edge logits.grad": logits.grad}


@pytest.mark.parametrize("scenario", ["random", "isolated", "star"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_edge_softmax_of_some_edges(pool, world_size, scenario):
    parts = SCENARIOS[scenario](world_size)
    data = random_data(parts, torch.float64)
    data.edges["chosen"] = data.edges["w"].squeeze(1) > 1
    check(pool, parts, data, [(softmax_of_some_edges, ())], modes=(1, 3), visible_order=True)


def softmax_of_special_logits(graph, data, norm_by):
    logits = data.leaf("special")
    softmax = sar.edge_softmax if isinstance(graph, sar.GraphShardManager) else dgl.nn.functional.edge_softmax
    scores = softmax(graph, logits, norm_by=norm_by)
    weighted_sum(scores, data.edges["edge cotangent"]).backward()
    return {"edge scores": scores, "edge logits.grad": logits.grad}


@pytest.mark.parametrize("world_size", [1, 2])
def test_edge_softmax_of_infinite_and_undefined_logits(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts, torch.float64)
    data.edges["special"] = data.edges["e"].clone()
    for column, special in enumerate((torch.inf, -torch.inf, torch.nan, 1e300)):
        data.edges["special"][column::4, column] = special
    data.edges["special"][:, 4] = -torch.inf
    check(pool, parts, data, [(softmax_of_special_logits, (end,)) for end in ("dst", "src")])


def unfit_logits(graph, data, kind):
    count = graph.num_edges()
    logits = {"rows": torch.rand(count + 1, 2), "dtype": torch.ones(count, dtype=torch.int64)}
    with graph.local_scope():
        sar.edge_softmax(graph, logits[kind])


@pytest.mark.parametrize("kind, word", [("rows", "rows"), ("dtype", "int64")])
@pytest.mark.parametrize("world_size", [2])
def test_unfit_logits(pool, kind, word):
    for failure in fail_on_all_ranks(pool, SCENARIOS["random"](2), unfit_logits, kind):
        assert failure.kind == "GraphError"
        assert word in failure.message
