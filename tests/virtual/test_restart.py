"""Training that is killed in the middle of an epoch goes on from its checkpoint, on any other workers, exactly."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import sar
from tests import leftovers
from tests.adapters.dgl.directories import homogeneous_graph
from tests.parity.harness import build, deal, random_data
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS
from tests.python_process import run
from tests.virtual.virtual_pool import VirtualPool


def train(mine, folder, kill):
    partition, data = mine
    graph, x, w = build(partition, 1), data.nodes["x"], data.edges["w"]
    torch.manual_seed(0)
    model = torch.nn.Linear(x.shape[1], 3).double()
    sar.sync_params(model)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}
    losses = []
    for epoch in range(sar.load_checkpoint(folder, **state, missing_ok=True)["step"], 4):
        hidden = weighted(graph, model(x).tanh(), w)
        if (epoch, sar.rank()) == (kill, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = weighted(graph, hidden, w).square().sum()
        state["optimizer"].zero_grad()
        loss.backward()
        sar.gather_grads(model)
        state["optimizer"].step()
        losses.append(sar.all_sum(loss.item()))
        sar.save_checkpoint(folder, **state, step=epoch + 1)
    return losses


def test_killed_in_the_middle_of_an_epoch(tmp_path):
    """One of 1 x 4; then 2 x 2 go on."""
    parts = SCENARIOS["random"](4)
    mine = deal(parts, random_data(parts, torch.float64))
    expected = VirtualPool(1, 4).run(train, tmp_path / "undisturbed", -1, per_rank=mine)
    outcomes = VirtualPool(1, 4).outcomes(train, tmp_path / "saved", 2, per_rank=mine)
    assert {outcome.kind for outcome in outcomes} == {"Died"}
    found = VirtualPool(2, 2).run(train, tmp_path / "saved", -1, per_rank=mine)
    for before, after in zip(expected, found, strict=True):
        assert after == pytest.approx(before[2:], rel=1e-9)
        assert before[3] != pytest.approx(before[2], rel=1e-3)


SCRIPT = """
import os, signal, sys, time
import sar, torch
import dgl.function as fn

parts, saved, victim = sys.argv[1:]
sar.initialize_comms()
data = sar.load_dgl_partition_data(parts, sar.rank(), "cpu")
graph, x = sar.construct_full_graph(data), data["feat"].float()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 3))
sar.sync_params(model)
state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
for epoch in range(sar.load_checkpoint(saved, **state, missing_ok=True)["step"], 4):
    graph.srcdata["h"] = model(x)
    graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "out"))
    if (epoch, sar.rank()) == (2, 2) and victim in ("worker", "launcher"):
        os.kill(os.getpid() if victim == "worker" else int(os.environ["SAR_LAUNCHER"]), signal.SIGKILL)
        time.sleep(100)
    loss = graph.dstdata["out"].square().sum()
    state["optimizer"].zero_grad()
    loss.backward()
    sar.gather_grads(model)
    state["optimizer"].step()
    sar.print("loss", sar.all_sum(loss.item()).hex(), flush=True)
    sar.save_checkpoint(saved, **state, step=epoch + 1)
"""


def launched(folder: Path, saved: str, victim: str) -> tuple[int, list[str]]:
    """The exit status and the losses of a training out of core."""
    options = "--workers", "1", "--memory", "8GiB", "--spill", str(folder / "spill")
    done = run(
        "-m", "sar", "launch", *options, folder / "train.py", folder / "parts", folder / saved, victim, timeout=100
    )
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("loss")]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_killed_under_the_launcher(tmp_path, victim):
    """Nothing is left but the checkpoint; the rest is the same to the last bit."""
    sar.partition_graph(homogeneous_graph(), "graph", 4, tmp_path / "parts")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "spill").mkdir()
    status, expected = launched(tmp_path, "undisturbed", "nobody")
    assert (status, len(expected)) == (0, 4)
    memory, processes = leftovers.shared_memory(), leftovers.marked_processes()
    status, before = launched(tmp_path, "saved", victim)
    assert (status, before) == (128 + signal.SIGKILL if victim == "worker" else -signal.SIGKILL, expected[:2])
    deadline = time.monotonic() + 10
    while (left := set(leftovers.marked_processes()) - set(processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert not leftovers.abandoned_shared_memory(memory)
    assert not any((tmp_path / "spill").iterdir())
    assert launched(tmp_path, "saved", "nobody") == (0, expected[2:])
