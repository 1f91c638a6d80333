"""`sar.profile` of virtual workers: each one's own turns, and what left memory."""

import time

import pytest
import torch
from torch import nn

import sar
from sar.train.profile import total
from tests.virtual.virtual_pool import VirtualPool, fill_the_heap

PLACES = 3
PAUSE = 0.15


class Sums(nn.Module):
    def forward(self, x, seconds):
        time.sleep(seconds)
        return sar.all_sum(x)


def profiled(spill):
    filling = fill_the_heap() if spill else []
    layer, kept = Sums(), torch.ones(1000, 50)
    with sar.profile() as p:
        for _ in range(2):
            layer(kept, PAUSE * sar.rank())
    del filling
    layers = [[one.layer for one in rows] for rows in p.workers]
    return layers, [total(rows).seconds for rows in p.workers], p.spilled, p.table(), kept.nbytes


@pytest.mark.parametrize("spill", [True, False])
def test_turns(spill):
    for layers, seconds, spilled, table, kept in VirtualPool(1, PLACES, spill).run(profiled, spill):
        assert layers == [["Sums", "everything else"]] * PLACES
        for rank, own in enumerate(seconds):
            assert 2 * PAUSE * rank <= own < 2 * PAUSE * rank + 3 * PAUSE
        assert len(spilled) == (PLACES if spill else 0)
        assert ("MB left memory" in table) == spill
        for one in spilled:
            assert one.left >= kept
            assert one.written >= kept
