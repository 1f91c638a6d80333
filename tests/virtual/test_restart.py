"""Training that is killed in the middle of an epoch goes on from its checkpoint, on any other workers, exactly."""

import os
import signal

import pytest
import torch

import sar
from tests.parity.harness import build, deal, random_data
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS
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
