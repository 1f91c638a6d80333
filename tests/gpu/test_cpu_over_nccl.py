"""What is on the CPU while workers talk over nccl: graphs, as of DistDGL, samplers, and a directory that is written."""

import contextlib

import pytest
import torch

from tests import pretend_gpu
from tests.core.test_devices import PROGRAMS
from tests.core.test_host_waits import DEVICE, over
from tests.gpu.places import CUDA, PRETEND, Place
from tests.parity.harness import build, deal, random_data
from tests.parity.scenarios import SCENARIOS
from tests.partition.test_writer_workers import write_together
from tests.partition.written import content_of, typed_graph, write

NCCL = [PRETEND, CUDA[2]]


@contextlib.contextmanager
def nccl(is_pretended):
    """A group over nccl that is pretended, or the pool's own."""
    if not is_pretended:
        yield
        return
    with pretend_gpu.PretendGpu(), over("nccl", DEVICE):
        yield


def run(mine, program, is_pretended):
    """What a program returns over the workers' own group, and over nccl."""
    if is_pretended:
        pretend_gpu.install()  # before the first backward
    partition, data = mine
    data.partition = partition
    results = []
    for context in (contextlib.nullcontext(), nccl(is_pretended)):
        with context:
            torch.manual_seed(1)
            graph = build(partition, 1)
            graph.ndata["y"] = data.nodes["y"]
            results.append([value.detach() for value in program(graph, data)])
    assert {value.device.type for found in results for value in found} == {"cpu"}
    return results


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("place", NCCL, indirect=True, ids=str)
def test_graphs_of_the_cpu(place: Place, program):
    """As over gloo."""
    parts = SCENARIOS["random"](place.world_size)
    mine = deal(parts, random_data(parts))
    for expected, found in place.pool.run(run, program, place.is_pretended, per_rank=mine):
        torch.testing.assert_close(found, expected)


def write_over_nccl(folder, is_pretended):
    if is_pretended:
        pretend_gpu.install()
    with nccl(is_pretended):
        write_together(folder)


@pytest.mark.parametrize("place", NCCL, indirect=True, ids=str)
def test_writing_a_directory(place: Place, tmp_path):
    write(typed_graph(), tmp_path / "expected")
    place.pool.run(write_over_nccl, tmp_path / "parts", place.is_pretended)
    assert content_of(tmp_path / "parts") == content_of(tmp_path / "expected")
