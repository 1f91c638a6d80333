"""Rebalancing: every constraint holds afterwards where that can be, and few nodes have moved."""

import dataclasses
import logging
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign import rebalance as rebalancing
from sar.partition.assign.rebalance import rebalance
from sar.partition.assign.task import FULL, fullness, list_schedule, within_capacity
from tests.partition.tasks import edge_task


def counts(part_of: Array, num_parts: int, weight: Array | None = None) -> Array:
    return np.bincount(part_of, weights=weight, minlength=num_parts)


def move_nodes(
    part_of: Array,
    num_parts: int,
    weights: Mapping[str, Array],
    imbalance: float,
    seed: int,
    attachment: Array | None = None,
) -> Array:
    task = edge_task(len(part_of), [], num_parts, weights=weights, imbalance=imbalance, seed=seed)
    return rebalancing.move_nodes(task, part_of, attachment)


@given(st.data())
def test_counts_within_limit_by_the_fewest_moves(data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, 6))
    part_of = np.array(data.draw(st.lists(st.integers(0, num_parts - 1), max_size=60)), np.int32)
    imbalance = data.draw(st.sampled_from(["0", "0.05", "0.5"]))
    balanced = move_nodes(part_of, num_parts, {}, float(imbalance), seed=0)
    mean = Fraction(len(part_of), num_parts)
    limit = max(np.floor((1 + Fraction(imbalance)) * mean), np.ceil(mean))
    assert balanced.dtype == part_of.dtype
    assert counts(balanced, num_parts).max() <= limit
    assert (balanced != part_of).sum() == np.maximum(counts(part_of, num_parts) - limit, 0).sum()


@pytest.mark.parametrize("imbalance", [0.0, 0.05])
@pytest.mark.parametrize("num_parts", [2, 7, 100])
def test_training_nodes_are_spread_by_exchange(num_parts: int, imbalance: float) -> None:
    """The first parts hold all training nodes, and no part can take another node."""
    num_nodes = 20 * num_parts
    part_of = np.arange(num_nodes, dtype=np.int32) // 20
    train = np.arange(num_nodes) < num_nodes // 2
    balanced = move_nodes(part_of, num_parts, {"train_mask": train}, imbalance, seed=1)
    assert counts(balanced, num_parts).max() <= 20 * (1 + imbalance)
    assert counts(balanced, num_parts, train).max() <= 10 * (1 + imbalance)


def test_several_skewed_weights(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    num_nodes, num_parts = 3000, 8
    in_edges = np.minimum(rng.zipf(2, num_nodes), 300)
    part_of = np.sort(rng.integers(num_parts, size=num_nodes)).astype(np.int32)
    weights = {
        "in_edges": np.sort(in_edges)[::-1],
        "train": np.arange(num_nodes) % 1000 < 400,
        "bytes": rng.random(num_nodes),
    }
    balanced = move_nodes(part_of, num_parts, weights, 0.05, seed=0)
    for weight in [np.ones(num_nodes), *weights.values()]:
        load = counts(balanced, num_parts, weight.astype(float))
        assert load.max() <= 1.05 * load.mean() * (1 + 1e-6)
    assert caplog.records == []
    assert np.array_equal(balanced, move_nodes(part_of, num_parts, weights, 0.05, seed=0))
    assert not np.array_equal(balanced, move_nodes(part_of, num_parts, weights, 0.05, seed=1))


def test_a_node_too_heavy_for_any_part_is_told(caplog: pytest.LogCaptureFixture) -> None:
    weight = np.ones(40)
    weight[3] = 100
    with caplog.at_level(logging.WARNING, logger="sar"):
        balanced = move_nodes(np.zeros(40, np.int32), 4, {"in_edges": weight}, 0.5, seed=0)
    assert counts(balanced, 4).max() <= 15
    assert counts(balanced, 4, weight)[balanced[3]] == 100 + (balanced == balanced[3]).sum() - 1
    [record] = caplog.records
    assert record.getMessage().startswith(f"part {balanced[3]} holds 10")
    assert "'in_edges', 2." in record.getMessage()
    assert "at most 1.500 times was asked for" in record.getMessage()


def test_nodes_that_lose_least_move() -> None:
    part_of = np.array([0] * 12 + [1] * 4, np.int32)
    attachment = np.array([9, 9, 9, 9, 0, 1, 2, 3, 9, 9, 9, 9, 0, 0, 0, 0])
    balanced = move_nodes(part_of, 2, {}, 0.0, seed=0, attachment=attachment)
    assert np.flatnonzero(balanced != part_of).tolist() == [4, 5, 6, 7]


def test_nodes_without_edges_in_their_part_move_elsewhere() -> None:
    """Nodes 0 and 1 have most edges, all into the other part; 2 to 5 are a ring; loops do not hold a node."""
    ring = [(2, 3), (3, 4), (4, 5), (5, 2)]
    edges = [(0, 0), (0, 0), *((hub, other) for hub in (0, 1) for other in (6, 7, 6)), *ring]
    part_of = np.array([0] * 6 + [1] * 2, np.int32)
    task = edge_task(8, edges, 2, imbalance=0.0)
    assert rebalance(task, part_of).tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    assert rebalance(dataclasses.replace(task, imbalance=0.5), part_of) is part_of


def test_a_little_too_much_does_not_move_a_hub() -> None:
    weight = np.array([20] + [1] * 80)  # the first part has 61, one above the limit; the other can take the hub
    part_of = (np.arange(81) >= 42).astype(np.int32)
    balanced = move_nodes(part_of, 2, {"in_edges": weight}, 0.2, seed=0)
    assert (balanced != part_of).sum() == 1
    assert balanced[0] == 0


def test_nodes_change_places_where_no_single_move_helps() -> None:
    weight = np.array([50, 3, 2, 2, 1, 1, 28, 27])
    part_of = np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int32)
    balanced = move_nodes(part_of, 2, {"in_edges": weight}, 0.0, seed=0)
    assert counts(balanced, 2).tolist() == [4, 4]
    assert counts(balanced, 2, weight).tolist() == [57, 57]


@given(st.data())
def test_items_go_to_the_part_that_is_least_occupied_in_all(data: st.DataObject) -> None:
    amounts = np.array(data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20)), float)
    amounts = amounts.reshape(-1, 2)
    num_parts = data.draw(st.integers(1, 5))
    means = np.maximum(amounts.sum(axis=0), 1)
    loads, expected = np.zeros((num_parts, 2)), []
    for amount in amounts:
        expected.append(int(np.argmin((loads * (1 / means)).max(axis=1))))
        loads[expected[-1]] += amount
    found = np.zeros((num_parts, 2))
    assert list_schedule(amounts, means, found).tolist() == expected
    assert np.array_equal(found, loads)


@pytest.mark.parametrize(
    "weight, told",
    [
        (np.ones(3), r"weight 'w' has shape \(3,\); expected \(4,\)"),
        (np.array([0, 1, -2, 0]), "weight 'w' of node 2 is -2; expected a number from 0 on"),
        (np.array([0, np.nan, 1, 0]), "weight 'w' of node 1 is nan"),
        (np.array([np.inf, 0, 1, 0]), "weight 'w' of node 0 is inf"),
    ],
)
def test_weights_that_cannot_be_balanced(weight: Array, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        edge_task(4, [], 2, weights={"w": weight}).constraints()


@pytest.mark.parametrize(
    "num_parts, imbalance, seed, told",
    [
        (0, 0.1, 0, "into 0 parts"),
        (2, -0.1, 0, "imbalance is -0.1"),
        *((2, 0.1, seed, rf"seed is {seed}; expected 0 to 2\*\*63 - 1") for seed in (-1, 2**63, 2**64)),
    ],
)
def test_tasks_that_cannot_be_met(num_parts: int, imbalance: float, seed: int, told: str) -> None:
    edge_task(4, [], 2, seed=2**63 - 1).constraints()
    with pytest.raises(ConfigError, match=told):
        edge_task(4, [], num_parts, imbalance=imbalance, seed=seed).constraints()


@pytest.mark.parametrize("wrong", [-1, 3])
def test_parts_that_do_not_exist_are_told(wrong: int) -> None:
    with pytest.raises(ConfigError, match=f"puts node 1 into part {wrong}; expected 0 to 2"):
        move_nodes(np.array([0, wrong, 2]), 3, {}, 0.1, seed=0)


@pytest.mark.parametrize("capacity", [3, 250, 4_200_000])
def test_a_part_takes_as_many_nodes_as_it_may_have_and_not_one_more(capacity):
    """So that no more pass over the edges has to bring it within the task's limit."""
    constraints = within_capacity(np.full((1, 1), 1 / capacity, np.float32))
    weight = float(constraints.weights[0, 0])
    assert fullness(constraints, np.array([[(capacity - 1) * weight]]), 0, 0) < FULL
    assert fullness(constraints, np.array([[capacity * weight]]), 0, 0) == FULL
