"""A worker that is killed, raises or freezes in any phase of training: the others end, and say why."""

import os
import subprocess
import sys
import time

import pytest

from tests.comm.launch import free_port
from tests.workers import REPOSITORY

LIMIT = 60.0
"""Seconds that the others may take, of which imports and the way to the phase take some."""

WORKER = """
import os, signal, sys, torch
import sar
from sar.comm.process_transport import ProcessTransport
from tests.parity.programs import pairwise, weighted
from tests.parity.scenarios import SCENARIOS
from tests.parity.harness import build

rank, size, victim, port = map(int, sys.argv[1:5])
end, phase = sys.argv[5:7]
sar.Config.timeout = 15.0
parts = SCENARIOS["random"](size)

def reach(name):
    if rank == victim and phase == name:
        print("here", flush=True)
        if end == "raise":
            raise ValueError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL if end == "kill" else signal.SIGSTOP)

connect = ProcessTransport._connect
ProcessTransport._connect = lambda *connections: reach("set-up") or connect(*connections)
sar.initialize_comms(rank, size, "127.0.0.1", master_port_number=port)
reach("construction")
graph = build(parts.partitions[rank], 1)
weight = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
x, w = torch.ones(graph.num_nodes(), 6).double() * weight, torch.ones(graph.num_edges(), 1).double()
h = pairwise(graph, x, w)
reach("forward")
h.register_hook(lambda grad: reach("backward"))
weighted(graph, h, w).sum().backward()
reach("gradient sum")
layer = torch.nn.Module()
layer.weight = weight
sar.gather_grads(layer)
print("done", flush=True)
"""

WORDS = {
    "kill": ("its process died", "could not connect to all 2 workers"),
    "raise": ("ValueError: on purpose", "its process died", "could not connect to all 2 workers"),
    "freeze": ("frozen", "could not connect to all 2 workers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("end", WORDS)
@pytest.mark.parametrize("phase", ["set-up", "construction", "forward", "backward", "gradient sum"])
def test_the_others_end(phase, end, victim):
    port, size = free_port(), 2
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, (rank, size, victim, port, end, phase))],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        assert "here" in workers[victim].stdout.readline()
        began = time.monotonic()
        said = workers[1 - victim].communicate(timeout=LIMIT)[0]
        seconds = time.monotonic() - began
        assert workers[1 - victim].returncode == 1, said
        assert any(words in said for words in WORDS[end]), said
        assert "sar.errors." in said, "an error of sar"
        assert f"orker {victim}" in said or "to all 2 workers" in said
        if end != "freeze" and phase != "set-up":  # gloo connects within `CONNECT_TIMEOUT`
            assert seconds < LIMIT / 4
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
