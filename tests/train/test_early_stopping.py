"""`sar.EarlyStopping`: when it stops, the model that it keeps, and workers that would not stop together."""

import math
from pathlib import Path

import pytest
import torch

import sar
from sar.errors import ConfigError
from tests.core.attempts import catch_and_recover
from tests.matrix import corner


def model_of(number, model=None):
    model = model or torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        model.weight.fill_(number)
        model.running_mean.fill_(10 * number + sar.rank())  # a worker's own
    return model


def run(values, options):
    """The steps after which to stop, and the best model's numbers."""
    stop = sar.EarlyStopping(**options)
    model = torch.nn.BatchNorm1d(2)
    verdicts = [
        stop.step(torch.tensor(value) if number % 2 else value, model_of(number, model))
        for number, value in enumerate(values)
    ]
    stop.load_best(model)
    return verdicts, stop.best, model.weight[0].item(), model.running_mean[0].item()


CASES = [
    ([0.1, 0.3, 0.2, 0.3, 0.29], {"patience": 3}, [False] * 4 + [True], 1),
    ([0.1, 0.2, 0.15, 0.4, 0.3, 0.3], {"patience": 2}, [False] * 5 + [True], 3),
    ([3.0, 1.0, 2.0], {"patience": 1, "mode": "min"}, [False, False, True], 1),
    ([1.0, 1.5, 2.0, 2.5], {"patience": 2, "min_delta": 1.0}, [False, False, True, False], 3),
    ([math.nan, -math.inf, math.nan, math.inf, 5.0], {"patience": 2}, [False] * 5, 3),
    ([-1.0, -2.0, -0.5], {"patience": 10}, [False] * 3, 2),
    ([-1.0, -2.0, -0.5], {"patience": 10, "mode": "min"}, [False] * 3, 1),
]


@pytest.mark.parametrize("world_size", [corner(1), 2])
@pytest.mark.parametrize("values, options, verdicts, best", CASES)
def test_it_stops_and_keeps_the_best(pool, values, options, verdicts, best, world_size):
    for rank, found in enumerate(pool.run(run, values, options)):
        value = pytest.approx(values[best], rel=1e-7)
        assert found == (verdicts, value, best, 10 * best + rank)


def local_metric(on_all):
    stop = sar.EarlyStopping()
    assert not stop.step(math.nan)
    return catch_and_recover(stop.step if sar.rank() or on_all else sar.all_sum, 0.5 + sar.rank() / 10)


@pytest.mark.parametrize("on_all", [True, False])
@pytest.mark.parametrize("world_size", [2])
def test_workers_never_part(pool, on_all):
    assert [failure.kind for failure in pool.run(local_metric, on_all)] == ["DisagreementError"] * 2


def refused():
    for options in ({"patience": 0}, {"mode": "most"}, {"min_delta": -0.1}, {"min_delta": math.nan}):
        with pytest.raises(ConfigError, match="EarlyStopping got"):
            sar.EarlyStopping(**options)
    stop = sar.EarlyStopping()
    stop.step(math.nan, model_of(0))
    with pytest.raises(ConfigError, match="No model is kept"):
        stop.load_best(model_of(0))


@pytest.mark.parametrize("world_size", [1])
def test_what_is_refused(pool):
    pool.run(refused)


def continued(folder):
    """Two steps, a checkpoint, and two more by another `EarlyStopping`."""
    first, stop = sar.EarlyStopping(patience=2), sar.EarlyStopping(patience=2)
    for number, value in enumerate([0.5, 0.4]):
        assert not first.step(value, model_of(number))
    sar.save_checkpoint(folder, step=2, loaders=first)
    sar.load_checkpoint(folder, loaders=stop)
    verdict, model = stop.step(0.5, model_of(2)), model_of(3)
    stop.load_best(model)
    return verdict, stop.best, model.weight[0].item(), model.running_mean[0].item()


@pytest.mark.parametrize("world_size", [2])
def test_it_goes_on_from_a_checkpoint(pool, tmp_path: Path):
    assert pool.run(continued, tmp_path) == [(True, 0.5, 0.0, float(rank)) for rank in range(2)]


def saved(file):
    stop = sar.EarlyStopping(patience=3, file=file)
    for number, value in enumerate([0.1, 0.3, 0.2]):
        stop.step(value, model_of(number))
    with pytest.raises(ConfigError, match="There is no model to save"):
        stop.step(0.5)


@pytest.mark.parametrize("world_size", [2])
def test_the_best_model_is_on_the_disk(pool, tmp_path: Path):
    pool.run(saved, tmp_path / "best.pt")
    state = torch.load(tmp_path / "best.pt", weights_only=True)
    assert (state["weight"][0], state["running_mean"][0]) == (1.0, 10.0)
