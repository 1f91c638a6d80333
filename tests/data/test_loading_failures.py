"""A worker that fails while it loads its partition stops the others, soon and with the reason."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import sar
from sar.data import load as partition_reader
from tests.adapters.dgl.directories import homogeneous_graph, write_directory
from tests.core.attempts import catch

LIMIT = 60.0


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(*_):
    raise MemoryError("no memory for 8 GiB")


def load_and_construct(path):
    sar.construct_full_graph(sar.load_dgl_partition_data(path, sar.rank(), "cpu"))


def load_while_one_fails(path: Path, fail):
    """Worker 1 fails after half of its work; the others say how their loading ended, and when."""
    sar.comm.all_reduce(torch.zeros(1))  # all workers are connected
    if sar.rank() == 1:
        partition_reader._shards = fail
        return load_and_construct(path)
    began = time.monotonic()
    failure = catch(load_and_construct, path)
    return failure, time.monotonic() - began


@pytest.mark.processes("breaks a module, which threads share, until the process ends")
@pytest.mark.parametrize(
    "fail, kind, reason", [(die, "Died", "1"), (run_out_of_memory, "MemoryError", "no memory for 8 GiB")]
)
@pytest.mark.parametrize("world_size", [3])
def test_the_others_end(pool, world_size, tmp_path, fail, kind, reason):
    path = write_directory(tmp_path, homogeneous_graph(), world_size).path
    outcomes = pool.outcomes(load_while_one_fails, path, fail, timeout=LIMIT)
    assert outcomes[1].kind == kind
    for outcome in (outcomes[0], outcomes[2]):
        failure, seconds = outcome.value
        assert failure.kind == "PeerError"
        assert "orker 1" in failure.message
        assert reason in failure.message
        assert seconds < LIMIT
