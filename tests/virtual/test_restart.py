"""Training that is killed in the middle of an epoch goes on from its checkpoint, on any other workers, exactly."""

import os
import re
import signal
import time
from pathlib import Path

import dgl
import pytest
import torch

import sar
from tests import leftovers
from tests.parity.harness import build, deal, random_data
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS
from tests.python_process import PythonProcess
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import REPOSITORY

EPOCHS = 6
SCRIPT = """
import os, sys, time
import sar, torch
import dgl.nn
sar.initialize_comms()
torch.set_default_dtype(torch.float64)
parts, folder, kill = *sys.argv[1:3], int(sys.argv[3])
data = sar.load_dgl_partition_data(parts, sar.rank(), "cpu")
graph, x, labels = sar.construct_full_graph(data), data["feat"].double(), data["label"]
torch.manual_seed(0)
model = torch.nn.ModuleList([dgl.nn.SAGEConv(24, 32, "mean"), dgl.nn.SAGEConv(32, 4, "mean")])
sar.sync_params(model)
rows = sar.nn.DistEmbedding(graph, 8, init_func=lambda shape, dtype: torch.zeros(shape, dtype=dtype))
adam, sparse = torch.optim.Adam(model.parameters(), lr=0.01), sar.nn.SparseAdam([rows], lr=0.01)
state = {"model": model, "optimizer": [adam, sparse]}
for epoch in range(sar.load_checkpoint(folder, **state, missing_ok=True)["step"], EPOCHS):
    hidden = model[0](graph, torch.cat([x, rows()], 1)).relu()
    if epoch == kill:
        os.write(1, f"stands {os.getpid()} in epoch {epoch} as worker {sar.rank()} of {sar.world_size()}\\n".encode())
        time.sleep(60 * (sar.rank() == sar.world_size() - 1))
    loss = torch.nn.functional.cross_entropy(model[1](graph, hidden), labels, reduction="sum") / 1500
    adam.zero_grad()
    sparse.zero_grad()
    loss.backward()
    sar.gather_grads(model)
    adam.step()
    sparse.step()
    sar.print(f"epoch {epoch} loss {sar.all_sum(loss.item())!r}")
    sar.save_checkpoint(folder, **state, step=epoch + 1)
"""


def make(folder: Path) -> dict[int, Path]:
    """The script, and one graph in two partitions and in four."""
    generator = torch.Generator().manual_seed(0)
    graph = dgl.graph(tuple(torch.randint(1500, (2, 9000), generator=generator)), num_nodes=1500)
    graph.ndata["feat"] = torch.randn(1500, 16, generator=generator)
    graph.ndata["label"] = torch.randint(4, (1500,), generator=generator)
    for parts in (2, 4):
        sar.partition_graph(graph, "graph", parts, folder / f"in {parts}", part_method="random")
    (folder / "spill").mkdir()
    (folder / "train.py").write_text(SCRIPT.replace("EPOCHS", str(EPOCHS)))
    return {parts: folder / f"in {parts}" / "graph.json" for parts in (2, 4)}


def start(folder: Path, parts: Path, saved: str, workers: int, virtual: bool, kill: int = -1) -> PythonProcess:
    how = ["--workers", str(workers), "--threads", "1"]
    how += ["--resident", "1", "--spill", str(folder / "spill")] if virtual else []
    arguments = [str(folder / "train.py"), str(parts), str(folder / saved), str(kill)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return PythonProcess("-m", "sar", "launch", *how, *arguments, env=environment, start_new_session=True)


def losses(output: str) -> dict[int, float]:
    return {int(epoch): float(loss) for epoch, loss in re.findall(r"epoch (\d+) loss (\S+)", output)}


def whole(*how) -> dict[int, float]:
    process = start(*how)
    try:
        output = process.communicate(timeout=100)[0]
    finally:
        process.kill()
    assert process.returncode == 0
    return losses(output)


def killed(last: int, *how) -> dict[int, float]:
    """Kill the launcher and all that is in its group once the last worker stands in the middle of the epoch."""
    process = start(*how)
    output, pids = "", []
    try:
        while f"as worker {last} of {last + 1}" not in output:
            line = process.line()
            assert line, output
            output += line
        pids = list(map(int, re.findall(r"stands (\d+)", output)))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    deadline = time.monotonic() + 10
    while left := leftovers.alive(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    return losses(output)


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


@pytest.mark.slow
def test_a_killed_run_goes_on_anywhere(tmp_path):
    """Virtual workers, processes of virtual workers, processes, and the same graph in other partitions."""
    in_parts = make(tmp_path)
    expected = whole(tmp_path, in_parts[4], "undisturbed", 1, True)
    assert set(expected) == set(range(EPOCHS))
    assert expected[EPOCHS - 1] < expected[0] - 0.01
    found, how = {}, [(4, 1, True, 1), (4, 2, True, 3), (2, 1, True, 4), (4, 4, False, 5)]
    for parts, workers, virtual, kill in how:
        found |= killed((parts if virtual else workers) - 1, tmp_path, in_parts[parts], "saved", workers, virtual, kill)
        assert set(found) == set(range(kill))
        assert not any((tmp_path / "spill").iterdir())
    found |= whole(tmp_path, in_parts[2], "saved", 2, False)
    assert found == pytest.approx(expected, abs=1e-9, rel=0)
