"""Tensors come back as they were once the files exceed the page cache, when they are written and read past it."""

import errno
import itertools
import os
import re
import subprocess
from threading import Event

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import sar
from sar.outofcore.spill import Disk, SpillFile
from sar.tensors.spillable import tensor_file
from tests.adapters.dgl.directories import homogeneous_graph
from tests.parity.harness import random_shares
from tests.virtual.test_combinations import in_a_forked_process, numbers, passes
from tests.virtual.test_two_processes import fills_the_disk, run
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import Err

PLACES = 3


# -- bits


def bits_of_features(file):
    """Of features, of a copy that leaves memory and comes back, and of what another worker gets of it."""
    data = sar.load_dgl_partition_data(file, sar.rank(), "cpu")
    features = data.node_features["_N/feat"]
    copy = features.clone()
    for _ in range(2):
        passes()
        torch.isnan(copy)
    copies = sar.comm.exchange_tensors([copy] * PLACES)
    return data.node_features["orig_id"], [each.view(torch.int32) for each in (features, copy, *copies)]


def test_every_bit_of_a_nan_stays(tmp_path):
    graph, random = homogeneous_graph(), np.random.default_rng(0)
    bits = random.integers(-(2**31), 2**31, (graph.num_nodes(), 300), np.int32)
    bits[:, :200] |= 0x7F800000  # infinite, or a NaN with whatever it carries
    bits[::3, ::2] &= 0xFF800000 - 2**32
    graph.ndata["feat"] = torch.from_numpy(bits).view(torch.float32)
    assert graph.ndata["feat"].isnan().any()
    assert graph.ndata["feat"].isinf().any()
    sar.partition_graph(graph, "graph", PLACES, tmp_path / "parts", allow_nan=True)
    found = VirtualPool(1, PLACES, fits=False).run(bits_of_features, tmp_path / "parts" / "graph.json")
    for ids, (features, copy, *_) in found:
        assert np.array_equal(features.numpy(), bits[ids.numpy()])
        assert torch.equal(copy, features)
    for _, (_, _, *received) in found:
        assert all(torch.equal(rows, features) for rows, (_, (features, *_)) in zip(received, found, strict=True))


# -- forks while tensors are read ahead


def by_a_loader(tensor):
    rows = TensorDataset(tensor.view(-1, 64))
    loader = DataLoader(rows, batch_size=256, num_workers=2, multiprocessing_context="fork")
    return torch.cat([batch for (batch,) in loader]).view(-1)


def by_a_subprocess(tensor):
    subprocess.run(["true"], preexec_fn=lambda: None, timeout=60, check=True)
    return tensor


def by_a_process_that_ends_at_once(tensor):
    child = os.fork()
    if not child:
        os._exit(int(tensor[7].item() != 7 + sar.rank()))
    assert os.waitpid(child, 0)[1] == 0
    return tensor


FORKS = {
    fork.__name__: fork for fork in (in_a_forked_process, by_a_loader, by_a_subprocess, by_a_process_that_ends_at_once)
}


def read_ahead_while_forked(name):
    """Whether tensors hold what they did before and after a fork in each turn."""
    first, second = numbers(), numbers(torch.float64)
    right = []
    for _ in range(3):
        passes()
        right.append(torch.equal(FORKS[name](first), numbers()))
        first.copy_(numbers())  # one case changes it
        right.append(torch.equal(second, numbers(torch.float64)))
    return right


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_while_tensors_are_read(name):
    assert VirtualPool(1, PLACES, fits=False).run(read_ahead_while_forked, name) == [[True] * 6] * PLACES


# -- changes that torch does not see


def changed_by_numpy():
    """Sums of what numpy has written before, between and after the turns of others, by torch."""
    tensor = numbers()
    array, found = tensor.numpy(), []
    for _ in range(3):
        array[:3] += 5
        passes()
        array[1] += 2
        passes()
        found.append((tensor - numbers()).sum().item())
    return found


def test_changes_by_numpy_between_turns():
    assert VirtualPool(1, PLACES, fits=False).run(changed_by_numpy) == [[17.0, 34.0, 51.0]] * PLACES


# -- a disk that is full, or does not answer


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk(processes):
    pool = VirtualPool(processes, 4 // processes, fits=False)
    outcomes = pool.outcomes(run, fills_the_disk, per_rank=random_shares(4), timeout=30)
    for outcome in outcomes:
        assert isinstance(outcome, Err)
        assert re.search(r"There is no space in \S+ for \d+\.\d MB of spilled tensors in ", outcome.message)


def recovers_from_a_failed_write():
    """The error of a disk that fails worker 1 in the middle of writing, and whether tensors are right afterwards."""
    tensors, file = [numbers() for _ in range(4)], tensor_file.value.file
    if sar.rank() == 1:
        writes = itertools.count()

        def fails_once(fd, memory, begin):
            if next(writes) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return os.pwritev(fd, memory, begin)

        file.transfer = lambda move, *args, **kwargs: SpillFile.transfer(
            file, fails_once if move is os.pwritev else move, *args, **kwargs
        )
    try:
        passes()
    except sar.errors.SarError as error:
        told = str(error)
        sar.recover()
    passes()
    return told, all(torch.equal(tensor, numbers()) for tensor in tensors)


@pytest.mark.parametrize("fits", [True, False])
def test_recovery_from_a_failed_write(fits):
    for told, right in VirtualPool(1, PLACES, fits=fits).run(recovers_from_a_failed_write):
        assert "The file of spilled tensors in" in told
        assert "Input/output error" in told
        assert right


def test_a_transfer_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sar.Config, "timeout", 0.3)
    disk, answers = Disk(1e9), Event()
    file = SpillFile(tmp_path, disk)
    transfers = [file.start(answers.wait) for _ in range(3)]
    with pytest.raises(sar.errors.SpillError, match=r"no answer within 0.3 s"):
        transfers[0].wait()
    assert not disk.close()
    answers.set()
    assert disk.close()
    file.close()
