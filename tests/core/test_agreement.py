"""Workers that do not make the same calls: all of them raise an error that tells who does what, and can go on."""

import dgl.function as fn
import dgl.nn
import pytest
import torch

import sar
from tests.core.attempts import assert_disagreement, catch_and_recover, fail_on_all_ranks
from tests.graphs import partition_in_memory, random_graph
from tests.parity.harness import assert_close, build, deal, random_data
from tests.parity.programs import pairwise, weighted
from tests.parity.scenarios import SCENARIOS, scattered

ODD = 1
"""The rank that does something else."""


def odd():
    return sar.rank() == ODD


def step(graph, data, x, w):
    """One training step of two layers."""
    weighted(graph, pairwise(graph, x, w), w).sum().backward()


def loss_misses_the_last_layer(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    h = pairwise(graph, x, w)
    out = weighted(graph, h, w)
    (h if odd() else out).sum().backward()


def loss_misses_a_branch(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    first, second = pairwise(graph, x, w), weighted(graph, x, w)
    (second if odd() else first + second).sum().backward()
    step(graph, data, x, w)


def skipped_layer(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    h = x if odd() else weighted(graph, x, w)
    weighted(graph, h, w).sum().backward()


def skipped_backward(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    out = weighted(graph, x, w)
    if not odd():
        out.sum().backward()
    step(graph, data, x, w)


def one_backward_too_many(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    loss = weighted(graph, x, w).sum()
    loss.backward(retain_graph=True)
    if odd():
        loss.backward()
    step(graph, data, x, w)


def backwards_in_another_order(graph, data):
    """Of two calls that look alike."""
    losses = [weighted(graph, data.leaf("x"), data.leaf("w")).sum() for _ in range(2)]
    for loss in losses if odd() else losses[::-1]:
        loss.backward()


def no_grad_on_one_rank(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    with torch.set_grad_enabled(not odd()):
        out = weighted(graph, x, w)
    if out.requires_grad:
        out.sum().backward()
    step(graph, data, x, w)


@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize(
    "program",
    [
        loss_misses_the_last_layer,
        loss_misses_a_branch,
        skipped_layer,
        skipped_backward,
        one_backward_too_many,
        backwards_in_another_order,
        no_grad_on_one_rank,
    ],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("world_size", [3])
def test_calls_in_another_order(pool, program, mode):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](3), program, mode=mode)
    assert_disagreement(failures, "worker 0: ", "worker 1: ", "worker 2: ")
    for failure in failures:
        calls = {line.strip().partition(": ")[::2] for line in failure.message.splitlines() if "worker " in line[:9]}
        calls = dict(call for call in calls if call[0] in ("worker 0", "worker 1", "worker 2"))
        assert calls["worker 0"] == calls["worker 2"] != calls["worker 1"], failure.message


class SkipsALayer(torch.nn.Module):
    """On the odd rank the first layer does not run."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(dgl.nn.SAGEConv(*widths, "mean").double() for widths in ((6, 6), (6, 3)))

    def forward(self, graph, x):
        return self.layers[1](graph, x if odd() else self.layers[0](graph, x))


def runs_a_model(graph, data):
    SkipsALayer()(graph, data.nodes["x"])


@pytest.mark.parametrize("world_size", [2])
def test_the_layers_are_named(pool):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](2), runs_a_model)
    assert_disagreement(failures, "worker 0: ", ", in layers.0 (SAGEConv)", "worker 1: ", ", in layers.1 (SAGEConv)")


def aggregate(graph, data, width=6, dtype=torch.float64, message="u_mul_e", reducer="sum"):
    graph.srcdata["h"] = data.nodes["x"][:, :width].to(dtype)
    graph.edata["w"] = data.edges["w"].to(dtype)
    function = fn.copy_u("h", "m") if message == "copy_u" else getattr(fn, message)("h", "w", "m")
    if reducer is None:
        graph.apply_edges(function)
    else:
        graph.update_all(function, getattr(fn, reducer)("m", "out"))


def aggregate_otherwise(graph, data, difference, settings):
    for name, value in settings.items() if odd() else ():
        setattr(sar.Config, name, value)
    aggregate(graph, data, **(difference if odd() else {}))


@pytest.mark.parametrize(
    "difference, settings",
    [
        ({"width": 5}, {}),
        ({"dtype": torch.float32}, {}),
        ({"message": "u_add_e"}, {}),
        ({"reducer": "mean"}, {}),
        ({"reducer": None}, {}),
        ({}, {"disable_sr": True}),
        ({}, {"comm_buffer_bytes": 4096}),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2])
def test_another_width_dtype_operation_or_setting(pool, difference, settings):
    failures = fail_on_all_ranks(pool, SCENARIOS["random"](2), aggregate_otherwise, difference, settings)
    assert_disagreement(failures, "worker 0: ", "worker 1: ", *(["Config"] if settings else []))
    for value in settings.values():
        assert str(value) in failures[0].message, "what the other worker has"


def step_on_another_graph(mine, other, mode):
    """The odd rank brings a partition of another graph along; then all go on with the common one."""
    partition, data = mine
    failure = catch_and_recover(build, other if odd() else partition, mode)
    return failure, weighted(build(partition, mode), data.nodes["x"], data.edges["w"])


def other_partitions():
    """Partitions for rank `ODD` that do not belong to the graph "random"."""
    fewer_nodes = partition_in_memory(random_graph(1, 39, 240), scattered(39, 2), 2)
    other_edges = partition_in_memory(random_graph(99, 40, 240), scattered(40, 2), 2)
    return {
        "of fewer nodes": fewer_nodes.partitions[ODD],
        "of other edges": other_edges.partitions[ODD],
        "of another rank": SCENARIOS["random"](2).partitions[0],
    }


@pytest.mark.parametrize("which", other_partitions())
@pytest.mark.parametrize("world_size", [2])
def test_another_graph(pool, which):
    """With equal node ranges, the edge IDs tell: a partition's begin where those of the partitions before it end."""
    parts = SCENARIOS["random"](2)
    data = random_data(parts)
    results = pool.run(step_on_another_graph, other_partitions()[which], 1, per_rank=deal(parts, data))
    for failure, _ in results:
        assert failure is not None, "built a graph out of pieces of two"
        assert failure.kind in ("PartitionError", "DisagreementError", "PeerError"), failure
    expected = weighted(parts.reference(), data.nodes["x"], data.edges["w"])
    assert_close(torch.cat([out for _, out in results]), expected)
