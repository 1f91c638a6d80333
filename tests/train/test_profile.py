"""`sar.profile` against the library's own counters and clocks, and the log of calls at level DEBUG."""

import json
import logging
import re
import time

import dgl.function as fn
import pytest
import torch
from torch import nn

import sar
from sar import comm
from sar.errors import ConfigError
from sar.train.profile import ELSEWHERE, by_layer, imbalance, total
from tests.parity.harness import build, deal, random_data
from tests.parity.scenarios import SCENARIOS

PAUSE = 0.2
"""Seconds: many times what the tiny model takes."""
LATE = 0.5 * PAUSE
KEPT = 64 * 2**20


class Layer(nn.Module):
    """A dense part before the sum over neighbours and one after it, and on request a pause in either direction."""

    def __init__(self, width):
        super().__init__()
        self.before, self.after = nn.Linear(6, width), nn.Linear(width, 6)
        self.forward_pause = self.backward_pause = 0.0
        self.scratch = 0

    def forward(self, graph, x):
        time.sleep(self.forward_pause)
        torch.ones(self.scratch, dtype=torch.uint8)
        with graph.local_scope():
            h = self.before(x)
            if h.requires_grad:
                h.register_hook(lambda _: time.sleep(self.backward_pause))
            graph.ndata["h"] = h
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            return self.after(graph.ndata["h"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(4), Layer(6), Layer(2)])
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def forward(self, graph, x):
        for layer in self.layers:
            x = torch.relu(layer(graph, x))
        return self.head(x)


@pytest.fixture
def given(world_size):
    """Each worker's partition and data."""
    parts = SCENARIOS["random"](world_size)
    return deal(parts, random_data(parts))


def prepared(mine, mode):
    partition, data = mine
    graph = build(partition, mode)
    torch.manual_seed(0)
    model = Model()
    sar.sync_params(model)
    return graph, data.nodes["x"], model, torch.optim.Adam(model.parameters())


def epoch(graph, x, model, optimizer):
    loss = model(graph, x).square().sum()
    optimizer.zero_grad()
    loss.backward()
    sar.gather_grads(model)
    optimizer.step()
    return loss.item()


def profiled(mine, mode):
    """Losses without and with a profile, bytes around, clocks around, and what the profile found."""
    training = prepared(mine, mode)
    plain = [epoch(*training) for _ in range(3)]
    training = prepared(mine, mode)
    outer = time.perf_counter()
    with sar.profile() as p:
        start, before = time.perf_counter(), comm.statistics()
        losses = [epoch(*training) for _ in range(3)]
        seconds, moved = time.perf_counter() - start, comm.statistics() - before
    outer = time.perf_counter() - outer
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    graph, x, model, _ = training
    before = comm.statistics()
    model.layers[0](graph, x)
    alone = comm.statistics() - before
    return plain, losses, moved, (seconds, outer), p.workers, p.table(), alone


@pytest.mark.processes("compares with the clocks of a process")
@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers_add_up_to_what_the_library_counts(pool, given, world_size, mode):
    results = pool.run(profiled, mode, per_rank=given)
    rows = [(f"layers.{i}", direction) for i in range(3) for direction in ("forward", "backward")]
    rows += [("gather_grads", ""), (ELSEWHERE, "")]
    for rank, (plain, losses, moved, (seconds, outer), workers, table, alone) in enumerate(results):
        assert losses == plain
        assert [(one.layer, one.direction) for one in workers[rank]] == rows
        everything = total(workers[rank])
        found = everything.moved
        assert (found.bytes_sent, found.bytes_received) == (moved.bytes_sent, moved.bytes_received)
        assert found.messages_sent == moved.messages_sent
        assert found.seconds_waited == pytest.approx(moved.seconds_waited)
        assert found.seconds_late <= found.seconds_waited <= everything.seconds
        assert seconds <= everything.seconds <= outer
        first = workers[rank][0].moved
        assert (first.bytes_sent, first.bytes_received) == (3 * alone.bytes_sent, 3 * alone.bytes_received)
        assert all(one.compute >= 0 and one.peak is not None for one in workers[rank])
        assert workers == results[0][4]
        assert table == results[0][5]
        assert max(map(len, table.splitlines())) <= 80
    if world_size > 1:
        assert results[0][2].bytes_sent > 0
        assert results[0][4][0][1].moved.bytes_sent > 0


def paused(mine):
    graph, x, model, optimizer = prepared(mine, 1)
    epoch(graph, x, model, optimizer)
    with sar.profile() as p:
        if sar.rank() == 1:
            model.layers[0].forward_pause = model.layers[1].backward_pause = PAUSE
        model.layers[2].scratch = KEPT
        epoch(graph, x, model, optimizer)
        time.sleep(PAUSE)
    return p.workers, p.table()


@pytest.mark.processes("compares with the clocks of a process")
@pytest.mark.parametrize("world_size", [2])
def test_time_and_memory_are_of_the_layer_that_takes_them(pool, given):
    workers, table = pool.run(paused, per_rank=given)[0]
    slowest, computed, late = re.findall(r"^worker (\d) computed longest, (.*) s; .* waited (.*) s for", table, re.M)[0]
    assert slowest == "1"
    assert float(computed) == pytest.approx(total(workers[1]).compute, abs=0.01)
    assert float(late) == pytest.approx(total(workers[0]).moved.seconds_late, abs=0.01)
    rows = {(of[0].layer, of[0].direction): of for of in by_layer(workers)}
    slow = {("layers.0", "forward"), ("layers.1", "backward")}
    assert slow < rows.keys()
    for key, (fast, slower) in rows.items():
        if key == (ELSEWHERE, ""):
            assert min(fast.compute, slower.compute) > PAUSE
            continue
        if key == ("layers.2", "forward"):  # which writes to much memory
            continue
        assert fast.compute < LATE
        assert (slower.compute > PAUSE) == (key in slow), key
    # The other worker waits for the slow one at the next call.
    assert rows["layers.0", "forward"][0].moved.seconds_late > LATE
    assert imbalance(rows["layers.0", "forward"]) > 1.5
    peaks = {key: max(one.peak for one in of) for key, of in rows.items()}
    assert peaks.pop(("layers.2", "forward")) > 0.9 * KEPT
    assert max(peaks.values()) < 0.5 * KEPT


def misused(mine):
    graph, x, model, optimizer = prepared(mine, 1)
    with sar.profile() as p:
        with pytest.raises(ConfigError, match="end that one first"), sar.profile():
            pass
        epoch(graph, x, model, optimizer)
        with pytest.raises(ConfigError, match="not complete"):
            p.table()
        if sar.rank() == 1:
            raise ValueError("on purpose")


@pytest.mark.parametrize("world_size", [2])
def test_an_exception_inside_reaches_all_workers(pool, given):
    waiting, raising = pool.outcomes(misused, per_rank=given, timeout=20)
    assert (raising.kind, waiting.kind) == ("ValueError", "PeerError")
    assert "Worker 1 raised ValueError: on purpose" in waiting.message
    pool.run(profiled, 1, per_rank=given)  # nothing is left behind


def traced(mine, folder):
    training = prepared(mine, 1)
    with torch.profiler.profile() as trace:
        epoch(*training)
    trace.export_chrome_trace(f"{folder}/{sar.rank()}.json")


@pytest.mark.processes("traces processes")
@pytest.mark.parametrize("world_size", [2])
def test_traces_of_torch_name_tiles_waits_and_kernels(pool, given, world_size, tmp_path):
    pool.run(traced, str(tmp_path), per_rank=given)
    for rank in range(world_size):
        names = {event.get("name", "") for event in json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]}
        assert "own edges" in names
        assert {f"wait for worker {1 - rank}", "wait for another worker", "kernel aggregate_sum", "aten::mm"} <= names
        assert any(name.startswith("tile 0-") and name.endswith(f"of worker {1 - rank}") for name in names)


def outside_modules(mine):
    partition, data = mine
    graph = build(partition, 1)
    convs = [Layer(6), Layer(6)]
    with sar.profile() as p:
        graph.ndata["h"] = data.leaf("x")
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
        convs[0](graph, convs[1](graph, graph.ndata["h"])).sum().backward()
        with torch.no_grad():
            convs[0](graph, data.nodes["x"])
    return [(one.layer, one.direction) for one in p.workers[0]]


@pytest.mark.parametrize("world_size", [2])
def test_calls_outside_modules_and_modules_without_a_model(pool, given):
    [rows, _] = pool.run(outside_modules, per_rank=given)
    both = ("forward", "backward")
    names = [(name, direction) for name in ("Layer", "Layer 2") for direction in both]
    assert rows == [("update_all, sum", ""), ("update_all, sum", "backward"), *names, (ELSEWHERE, "")]


def logged(mine):
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    training = prepared(mine, 1)
    keep, level = Keep(), sar.logger.level
    epoch(*training)  # a process's first epoch may give hints
    sar.logger.addHandler(keep)
    epoch(*training)
    quiet = list(lines)
    sar.logger.setLevel("DEBUG")
    try:
        before = comm.statistics()
        epoch(*training)
        return quiet, lines, comm.statistics() - before
    finally:
        sar.logger.removeHandler(keep)
        sar.logger.setLevel(level)


@pytest.mark.processes("reads the log of a process")
@pytest.mark.parametrize("world_size", [2])
def test_the_log_has_a_line_for_each_call(pool, given):
    for quiet, lines, moved in pool.run(logged, per_rank=given):
        assert quiet == []
        assert len(lines) == 7  # three layers in both directions, and gather_grads
        there = "update_all, sum of copy(u['h']): torch.float32, widths (4,); along ('_N', '_E', '_N'), gradients on: "
        assert lines[0].startswith(there)
        assert lines[5].startswith(f"backward of {there}")
        assert all(" s, of which " in line for line in lines)
        assert sum(int(line.split(" waiting; ")[1].split(" bytes sent")[0]) for line in lines) == moved.bytes_sent
