"""The training that each launcher starts: of a small graph in two partitions, with the losses of DGL on one machine."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import sar
from tests.examples.scripts import generated
from tests.examples.test_full_graph import training_of_one_process

EPOCHS = 5


def make_partitions(folder: Path) -> list[float]:
    """Write `parts/generated.json`; returns the loss of each epoch of `full_graph.py` on it."""
    graph = generated()
    sar.partition_graph(graph, "generated", 2, folder / "parts")
    return training_of_one_process(graph, EPOCHS)[0]


def told_losses(said: str) -> list[tuple[int, float]]:
    """Epochs and losses that were printed, in this order."""
    found = re.findall(r"epoch (\d+): loss ([\d.]+)", said)
    return [(int(epoch), float(loss)) for epoch, loss in found]


def output_of(command: Sequence[str], folder: Path, environment: Mapping[str, str], limit: float) -> str:
    """What a command prints that has to succeed; after `limit` seconds it is killed with all that it has started."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    return said
