"""A training script as virtual workers: unchanged, under `sar launch` and torchrun; what is left when it is ended."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from sar.errors import ConfigError
from sar.outofcore.workers import wanted
from tests import leftovers
from tests.comm.launch import free_port
from tests.python_process import PythonProcess
from tests.workers import REPOSITORY

SCRIPT = """
import atexit, os, sys
import sar, torch

@atexit.register
def says_goodbye():
    if sar.comm.is_initialized():
        os.write(1, f"goodbye of {sar.rank()} of {sar.world_size()}\\n".encode())

FROM_THE_FIRST_LINE = 1
if __name__ == "__main__":
    sar.initialize_comms()
    sar.initialize_comms()
    torch.manual_seed(3 + sar.rank())
    model = torch.nn.Linear(300, 100)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(10**6 if sys.argv[1] == "forever" else 3):
        optimizer.zero_grad()
        loss = model(torch.randn(200, 300)).square().mean()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        os.write(1, f"step {step} worker {sar.rank()} of {sar.world_size()}\\n".encode())
        loss = sar.all_sum(loss.item())
    sys.modules["__main__"].FROM_THE_FIRST_LINE += sar.rank()
    assert FROM_THE_FIRST_LINE == 1 + sar.rank()
    told = f"loss {loss:.6f} drawn {torch.rand(()).item():.6f}\\n"
    os.write(1, told.encode())  # at once, as processes share a pipe
    sys.exit(sys.argv[1] == "fail" and sar.rank() == 1 and 5)
"""


def start(folder: Path, *command: str, **environment: str) -> PythonProcess:
    """Run the script with this command before its name."""
    (folder / "train.py").write_text(SCRIPT)
    variables = {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    return PythonProcess(*command[:-1], folder / "train.py", command[-1], cwd=folder, env={**os.environ, **variables})


def finish(process: PythonProcess) -> tuple[int, list[str], str]:
    try:
        out, told = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), told


LAUNCH = ("-m", "sar", "launch", "--workers", "1")
VIRTUAL = {"SAR_RESIDENT": "1", "SAR_PARTS": "3"}


def results(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if line.startswith("loss"))


@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_as_processes(tmp_path, compared):
    spill = tmp_path / "spill"
    spill.mkdir()
    status, lines, told = finish(
        start(tmp_path, *LAUNCH, "--resident", "1", "--spill", str(spill), "train", SAR_PARTS="3")
    )
    assert status == 0, told
    assert [f"step 0 worker {rank} of 3" in lines for rank in range(3)] == [True] * 3
    assert len(results(lines)) == 3
    assert sorted(line for line in lines if line.startswith("goodbye") and "of 3" in line) == [
        f"goodbye of {rank} of 3" for rank in range(3)
    ]
    assert not any(spill.iterdir())
    if compared:
        processes = start(tmp_path, "-m", "sar", "launch", "--workers", "3", "train")
        assert results(finish(processes)[1]) == results(lines)


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    status, lines, told = finish(start(tmp_path, *command, "train", **VIRTUAL, SAR_SPILL_DIR=str(tmp_path)))
    assert status == 0, told
    assert len(results(lines)) == 4  # as many workers in each process
    assert "step 2 worker 3 of 4" in lines


@pytest.mark.slow
def test_the_exit_status_is_the_scripts(tmp_path):
    process = start(tmp_path, *LAUNCH, "fail", **VIRTUAL, SAR_SPILL_DIR=str(tmp_path))
    assert finish(process)[0] == 5


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(tmp_path, end):
    spill = tmp_path / "spill"
    spill.mkdir()
    process = start(tmp_path, "forever", **VIRTUAL, SAR_SPILL_DIR=str(spill))
    while "worker 2" not in process.line():
        assert process.poll() is None
    assert not any(spill.iterdir())
    began = time.monotonic()
    process.send_signal(end)
    status, _, told = finish(process)
    assert status == -end, told
    assert time.monotonic() - began < 60
    assert not any(spill.iterdir())
    if end == signal.SIGINT:
        assert "KeyboardInterrupt" in told


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("end", "told"),
    [
        (signal.SIGINT, r"raised KeyboardInterrupt"),
        (signal.SIGKILL, r"its process died|The job's store is gone|the store cannot be reached"),
    ],
)
def test_one_of_two_processes_is_ended(tmp_path, end, told, victim):
    """Its workers' peers say so, and leave nothing."""
    spill, port, before = tmp_path / "spill", free_port(), leftovers.shared_memory()
    spill.mkdir()
    common = {**VIRTUAL, "SAR_PARTS": "4", "SAR_SPILL_DIR": str(spill), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [start(tmp_path, "forever", **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    for process in processes:
        while "step 1 " not in process.line():
            assert process.poll() is None
    began = time.monotonic()
    processes[victim].send_signal(end)
    status, _, output = finish(processes[1 - victim])
    assert status == 1, output
    assert re.search(told, output), output
    assert finish(processes[victim])[0] == -end
    assert time.monotonic() - began < 60
    assert not any(spill.iterdir())
    assert not leftovers.abandoned_shared_memory(before)
    assert not leftovers.listens(port)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"SAR_RESIDENT": "2"}, "SAR_RESIDENT is '2'; expected 1"),
        ({"SAR_SPILL_DIR": ""}, "need SAR_SPILL_DIR"),
        ({"SAR_PARTS": "many"}, "SAR_PARTS is 'many'"),
    ],
)
def test_what_cannot_be(variables, told):
    with pytest.raises(ConfigError, match=told):
        wanted({**VIRTUAL, "SAR_SPILL_DIR": "spill", **variables})
