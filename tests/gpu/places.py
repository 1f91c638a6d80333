"""Where tests of GPUs run: on workers with the pretend device, and on CUDA devices where there are some."""

from dataclasses import dataclass, field

import pytest

from tests import pretend_gpu
from tests.workers import WorkerPool


@dataclass
class Place:
    """Workers, and the device that each computes on: over gloo they share it, over nccl each has its own."""

    device: str
    world_size: int
    backend: str = "gloo"
    pool: WorkerPool = field(init=False, compare=False)

    def __str__(self) -> str:
        return f"{self.device}, {self.world_size} workers, {self.backend}"

    @property
    def is_pretended(self) -> bool:
        return self.device == pretend_gpu.NAME


PRETEND = pytest.param(
    Place(pretend_gpu.NAME, 2),
    marks=pytest.mark.skipif(not pretend_gpu.available(), reason="this torch cannot have devices made in Python"),
)
CUDA = [
    pytest.param(Place("cuda", 1), marks=pytest.mark.gpu),
    pytest.param(Place("cuda", 2), marks=pytest.mark.gpu),
    pytest.param(Place("cuda", 2, "nccl"), marks=pytest.mark.gpu(devices=2)),
]
PLACES = [PRETEND, *CUDA]
"""For the fixture `place`, indirectly."""
