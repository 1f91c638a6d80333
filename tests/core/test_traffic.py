"""What travels: each halo row once a fetch, within the limits of messages, and again in the backward where needed.

Messages may come late: what was not waited for would be computed from whatever the buffer held before.
"""

import time

import dgl.function as fn
import pytest
import torch

import sar
from sar import comm
from sar.comm import session
from sar.comm.exchange import Exchange
from sar.comm.rows import BufferPool, RowFormat
from sar.comm.tiles import OWN_ROWS, GradientReturn, Layout, Settings
from sar.core.relation import TILE_SIZES
from tests.graphs import PartitionedGraph
from tests.parity.harness import assert_close, build, deal, merge, random_data, random_shares, run_program
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS

WIDTH, ITEM = 6, 8
SLACK = 400
"""Bytes per message for alignment, and per call for the agreement."""


def halo_rows(parts: PartitionedGraph) -> list[list[int]]:
    """[sender][reader]: distinct nodes of one worker that another reads."""
    owner = torch.repeat_interleave(torch.arange(len(parts.node_counts)), torch.tensor(parts.node_counts))
    return [
        [
            0
            if sender == reader
            else len(parts.src[(owner[parts.src] == sender) & (owner[parts.dst] == reader)].unique())
            for reader in range(len(parts.node_counts))
        ]
        for sender in range(len(parts.node_counts))
    ]


def exchanged(pool, rank: int) -> list[tuple[int, int]]:
    """(sender, reader) of the messages that a worker sends in its turn: those of all workers of its process."""
    first = rank - rank % pool.each
    readers = [reader for reader in range(rank % pool.each, pool.world_size, pool.each) if reader != rank]
    return [(sender, reader) for sender in range(first, first + pool.each) for reader in readers]


def measure(mine, message, mode, settings):
    """(bytes, messages) sent in the forward and in the backward."""
    partition, data = mine
    graph = build(partition, mode)
    for name, value in settings.items():
        setattr(sar.Config, name, value)
    graph.ndata["x"], graph.edata["w"] = data.leaf("x"), data.edges["w"]
    fields = ("x", "w") if message == "u_mul_e" else ("x",) if message == "copy_u" else ("x", "x")
    start = comm.statistics()
    graph.update_all(getattr(fn, message)(*fields, "m"), fn.sum("m", "out"))
    middle = comm.statistics()
    graph.ndata["out"].sum().backward()
    there, back = middle - start, comm.statistics() - middle
    return (there.bytes_sent, there.messages_sent), (back.bytes_sent, back.messages_sent)


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("message, reads_sources", [("copy_u", False), ("u_mul_e", False), ("u_mul_v", True)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_row_travels_once_and_again_only_where_needed(pool, world_size, message, reads_sources, mode):
    """The backward returns gradients, and sends rows again if a derivative has their values and mode 1 dropped them."""
    parts = SCENARIOS["random"](world_size)
    rows = halo_rows(parts)
    results = pool.run(measure, message, mode, {}, per_rank=deal(parts, random_data(parts, torch.float64)))
    for rank, (there, back) in enumerate(results):
        out = sum(rows[rank]) * WIDTH * ITEM
        returned = sum(sender[rank] for sender in rows) * WIDTH * ITEM
        again = out if reads_sources and mode == 1 else 0
        assert out <= there[0] <= out + SLACK
        assert returned + again <= back[0] <= returned + again + SLACK
        assert there[1] == sum(rows[sender][reader] > 0 for sender, reader in exchanged(pool, rank))


@pytest.mark.parametrize(
    "settings, elements",
    [
        ({"max_collective_size": 13}, 13),
        ({"max_collective_size": 24, "pipeline_depth": 0}, 24),
        ({"max_collective_size": 1}, WIDTH),
        ({"comm_buffer_bytes": 1}, WIDTH),
        ({"comm_buffer_bytes": 2 * WIDTH * ITEM, "pipeline_depth": 0}, WIDTH),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_stay_within_the_limits(pool, world_size, settings, elements):
    """A message never holds less than one row."""
    parts = SCENARIOS["random"](world_size)
    rows = halo_rows(parts)
    results = pool.run(measure, "copy_u", 1, settings, per_rank=deal(parts, random_data(parts, torch.float64)))
    for rank, (there, back) in enumerate(results):
        rows_a_message = max(elements // WIDTH, 1)
        pairs = exchanged(pool, rank)
        assert there[1] >= sum(-(-rows[sender][reader] // rows_a_message) for sender, reader in pairs)
        elsewhere = [sender for sender in range(world_size) if sender // pool.each != rank // pool.each]
        assert back[1] >= sum(-(-rows[sender][rank] // rows_a_message) for sender in elsewhere)


class CountingPool(BufferPool):
    """Notes the most bytes that were in use."""

    used = most = 0

    def take(self, size):
        buffer = super().take(size)
        self.used += buffer.nbytes
        self.most = max(self.most, self.used)
        return buffer

    def give(self, buffer):
        self.used -= buffer.nbytes
        super().give(buffer)


def exchange_at_depth(mine, depth, both_ways, grads):
    """Messages sent before anything is computed, the most bytes in buffers, and a budget that makes tiles one row."""
    partition, data = mine
    graph, row = build(partition, 1), WIDTH * ITEM
    sar.Config.pipeline_depth = depth
    sar.Config.comm_buffer_bytes = budget = (4 if both_ways else 2) * (depth + 1) * row
    group, pool = session.current_group(), CountingPool(torch.device("cpu"))
    usual, group.pool = group.pool, pool
    fields = [data.nodes["x"]]
    plan, width = graph.call_context().relation.plan, RowFormat.of(fields)
    settings = Settings.current()
    layout = Layout.of(plan, settings, width, both_ways=both_ways)
    with group.guard():  # else the call would stay this thread's
        group.agree("an exchange")
        returns = GradientReturn(fields, lambda rows, values, total: None) if grads else None
        start = comm.statistics()
        exchange = Exchange(group, plan, settings, layout, "an exchange", torch.device("cpu"), fields, returns=returns)
        at_once = (comm.statistics() - start).messages_sent
        for tile in exchange.tiles():
            assert (tile.grads is not None) == (grads and tile is not OWN_ROWS)
    group.pool = usual
    assert pool.used == 0
    return at_once, pool.most, budget


@pytest.mark.processes("of the exchange among processes")
@pytest.mark.parametrize("both_ways, grads", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("world_size", [2])
def test_buffers_are_used_from_the_start_and_keep_within_their_limit(pool, world_size, depth, both_ways, grads):
    """What gradients need later holds rows while the own shard is computed."""
    mine = random_shares(world_size, torch.float64)
    for at_once, most, budget in pool.run(exchange_at_depth, depth, both_ways, grads, per_rank=mine):
        assert at_once == (2 if both_ways else 1) * depth + 1
        assert most <= budget


def widths_in_turn(mine, widths):
    """After calls of all widths: how many tiles are kept, by size, and whether numbers and gradients were right."""
    partition, data = mine
    graph = build(partition, 1)
    sar.Config.comm_buffer_bytes, sar.Config.pipeline_depth = 16 * 2 * max(widths), 0
    right, first = [], None
    for width in [*reversed(widths), *widths]:
        x = data.nodes["x"][:, :1].repeat(1, width).requires_grad_()
        graph.ndata["x"] = x
        graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "out"))
        graph.ndata["out"].sum().backward()
        result = graph.ndata["out"][:, 0].detach()
        first = result if first is None else first
        right.append(bool(torch.allclose(result, first)) and torch.equal(x.grad[:, 0], graph.out_degrees().double()))
    kept = graph.call_context().relation._tiles
    return {size: len(tiles) for size, tiles in kept.items()}, right


@pytest.mark.parametrize("world_size", [2])
def test_tiles_of_a_few_sizes_are_kept(pool, world_size):
    """Those used last, whatever the number of widths; a relation that kept them all would grow with each."""
    parts, widths = SCENARIOS["random"](world_size), [1, 2, 4, 8, 16, 32, 64]
    mine = deal(parts, random_data(parts, torch.float64))
    for kept, right in pool.run(widths_in_turn, widths, per_rank=mine):
        assert len(kept) <= TILE_SIZES
        if pool.each == 1:  # else rows that do not travel have tiles of their own, or none
            assert list(kept) == [16, 8, 4, 2][-TILE_SIZES:]
            assert kept[2] > kept[4] > kept[8] > 1
        assert all(right)


# -- messages that come late

LATE = 0.2
"""Seconds between the agreement and what one worker posts."""


def forward_and_backward(graph, data):
    x, w = data.leaf("x"), data.leaf("w")
    out = weighted(graph, x, w)
    (out * data.nodes["y"]).sum().backward()
    return {"node out": out, "node x.grad": x.grad, "edge w.grad": w.grad}


def with_a_late_worker(mine, late, mode):
    partition, data = mine
    graph, post = build(partition, mode), Exchange._post

    def later(self, *args):
        time.sleep(LATE)
        return post(self, *args)

    if sar.rank() == late:
        Exchange._post = later
    try:
        return run_program(forward_and_backward, graph, data)
    finally:
        Exchange._post = post


@pytest.mark.processes("delays the messages of one worker, by a change of a class that threads share")
@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("world_size", [2])
def test_rows_and_gradients_are_waited_for(pool, world_size, late, mode):
    parts = SCENARIOS["random"](world_size)
    data = random_data(parts)
    found = merge(pool.run(with_a_late_worker, late, mode, per_rank=deal(parts, data)))
    for name, value in run_program(forward_and_backward, parts.reference(), data).items():
        assert_close(found[name], value)
