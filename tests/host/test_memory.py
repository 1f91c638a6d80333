"""The memory that the demo reports."""

import torch

from sar.host.memory import PeakMemory

MEGA = 2**20


def test_a_peak_counts_after_it_is_over_and_earlier_ones_do_not() -> None:
    earlier = torch.ones(200 * MEGA // 4)
    del earlier
    memory = PeakMemory()
    assert memory.above_baseline() < 50 * MEGA
    block = torch.ones(100 * MEGA // 4)
    del block
    assert 95 * MEGA < memory.above_baseline() < 130 * MEGA
