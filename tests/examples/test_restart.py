"""A worker is killed, or the job gets SIGTERM: training goes on from the last checkpoint, and ends bit for bit."""

import os
import re
from pathlib import Path

import pytest
import torch

from tests.examples.scripts import TORCHRUN, generated, partition, run

EPOCHS = 5
KILLED = """
import os, runpy, signal, sys
import sar, sar.train.checkpoint as checkpoint

save = checkpoint.save_checkpoint
def save_and_die(folder, *, step, **state):
    save(folder, step=step, **state)
    if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and sar.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save_checkpoint = save_and_die
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

STOPPED = """
import os, runpy, signal, sys, time
import sar, sar.train.checkpoint as checkpoint
from sar.host.signals import signal_noted

save = checkpoint.save_checkpoint
def save_and_signal(folder, *, step, **state):
    save(folder, step=step, **state)
    if step == 3 and sar.rank() == 1:
        os.kill(os.getppid(), signal.SIGTERM)
        while not signal_noted():
            time.sleep(0.01)
checkpoint.save_checkpoint = save_and_signal
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_job_that_gets_sigterm_saves_and_goes_on(tmp_path: Path) -> None:
    options = [*partition(generated(), tmp_path), "--epochs", str(EPOCHS)]
    stopping = tmp_path / "stopping.py"
    stopping.write_text(STOPPED)
    launch, script = ("-m", "sar.cli", "launch", "--workers", "2"), "examples/full_graph.py"
    undisturbed = run(*launch, script, *options, "--checkpoint", str(tmp_path / "undisturbed"))
    checkpoint = "--checkpoint", str(tmp_path / "stopped")
    said = [run(*launch, *program, *options, *checkpoint) for program in ([str(stopping), script], [script])]
    first, second = (re.findall(r"^(?:epoch|test) .*$", text, re.MULTILINE) for text in said)
    assert len(first) == 4  # a checkpoint later, with status 0
    assert first + second == undisturbed.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, options", [("full_graph", []), ("minibatch", ["--batch-size", "50", "--num-workers", "1"])]
)
def test_training_goes_on_after_a_kill(tmp_path: Path, script: str, options: list[str]) -> None:
    options = [*partition(generated(), tmp_path), "--epochs", str(EPOCHS), *options]
    killer = tmp_path / "killer.py"
    killer.write_text(KILLED)
    said, models = {}, {}
    for name in ("undisturbed", "killed"):
        program = [str(killer), f"examples/{script}.py"] if name == "killed" else [f"examples/{script}.py"]
        folder = tmp_path / name
        said[name] = run(*TORCHRUN, "2", "--max-restarts", "1", *program, *options, "--checkpoint", str(folder))
        assert sorted(os.listdir(folder)) == ["latest", *(f"step-{step:06d}" for step in (EPOCHS - 1, EPOCHS))]
        models[name] = torch.load(folder / f"step-{EPOCHS:06d}" / "shared.pt", weights_only=True)["model"]
    lines = {name: re.findall(r"^epoch \d+: loss .*$", text, re.MULTILINE) for name, text in said.items()}
    assert len(lines["undisturbed"]) == EPOCHS
    assert lines["killed"] == lines["undisturbed"]
    assert models["killed"].keys() == models["undisturbed"].keys()
    assert all(torch.equal(value, models["undisturbed"][key]) for key, value in models["killed"].items())
