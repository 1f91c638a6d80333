"""Measures of an assignment against plain NumPy."""

import numpy as np
import pytest

from benchmarks.quality import measure_quality
from tests.partition.tasks import source


@pytest.mark.parametrize("num_parts", [1, 3, 20])
def test_measures_are_those_of_numpy(num_parts):
    rng = np.random.default_rng(num_parts)
    src, dst = rng.integers(200, size=(2, 3000))
    part_of, weight = rng.integers(num_parts, size=200), rng.random(200)
    quality = measure_quality(source(src, dst, 200), part_of, num_parts, {"weight": weight})
    assert quality.edge_cut == pytest.approx(np.mean(part_of[src] != part_of[dst]))
    sums = [weight[part_of == part].sum() for part in range(num_parts)]
    assert quality.balance["weight"] == pytest.approx(max(sums) / np.mean(sums))
    for name, nodes in (("nodes", np.arange(200)), ("in_edges", dst)):
        counts = np.bincount(part_of[nodes], minlength=num_parts)
        assert quality.balance[name] == pytest.approx(counts.max() / counts.mean())
