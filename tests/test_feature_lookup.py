"""`data["feat"]` and `suffix_key_lookup`: which feature a key finds, and how rows of several types are put together."""

import pytest
import torch

from sar.common_tuples import PartitionData, suffix_key_lookup
from sar.errors import FieldError

TYPES = torch.tensor([0, 1, 0, 2, 1, 0], dtype=torch.int32)
NODES = {
    "_TYPE": TYPES,
    "_ID": torch.arange(6),
    "paper/feat": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    "paper/my_feat": torch.tensor([10.0, 20.0, 30.0]),
    "paper/year": torch.tensor([1998, 2003, 2011]),
    "author/feat": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]),
}
NAMES = ["paper", "author", "venue"]


DEEP = {"paper/raw/feat": torch.zeros(1), "author/cooked/feat": torch.ones(1)}
BOTH = {"feat": torch.zeros(4), "paper/feat": torch.ones(4)}
AFTER_TO_HOMOGENEOUS = {"_TYPE": torch.zeros(2), "_N/_TYPE": torch.tensor([3, 1])}


@pytest.mark.parametrize(
    "features, key, found",
    [
        (NODES, "my_feat", "paper/my_feat"),
        (NODES, "author/feat", "author/feat"),
        (NODES, "_TYPE", "_TYPE"),
        (BOTH, "feat", "feat"),
        (AFTER_TO_HOMOGENEOUS, "_TYPE", "_N/_TYPE"),  # which a user has set
        (DEEP, "raw/feat", "paper/raw/feat"),
    ],
)
def test_a_key_finds_whole_last_components(features, key, found):
    assert suffix_key_lookup(features, key) is features[found]


@pytest.mark.parametrize(
    "features, key, message",
    [
        (
            {"paper/my_feat": torch.zeros(3), "my/other_feat": torch.zeros(3)},
            "feat",
            "no feature 'feat'; expected one of my/other_feat, paper/my_feat",
        ),
        (DEEP, "aw/feat", "no feature 'aw/feat'"),
        (NODES, "feat", r"\['paper/feat', 'author/feat'\]"),
    ],
)
def test_endings_and_two_matches_are_errors(features, key, message):
    with pytest.raises(FieldError, match=message):
        suffix_key_lookup(features, key)


@pytest.mark.parametrize(
    "key, expected",
    [
        ("feat", [[1.0, 2.0], [-1.0, -2.0], [3.0, 4.0], [0.0, 0.0], [-3.0, -4.0], [5.0, 6.0]]),
        ("year", [1998, 0, 2003, 0, 0, 2011]),
        ("author/feat", [[0.0, 0.0], [-1.0, -2.0], [0.0, 0.0], [0.0, 0.0], [-3.0, -4.0], [0.0, 0.0]]),
    ],
)
def test_expand_puts_the_types_in_order_and_zeros_elsewhere(key, expected):
    values = suffix_key_lookup(NODES, key, expand_to_all=True, type_list=NAMES)
    assert values.tolist() == expected
    assert values.dtype == (torch.int64 if key == "year" else torch.float32)


def test_expand_accepts_canonical_edge_types():
    edges = {"_TYPE": torch.tensor([1, 0, 1]), "a:x:b/w": torch.tensor([7.0]), "b:y:a/w": torch.tensor([8.0, 9.0])}
    types = [("a", "x", "b"), ("b", "y", "a")]
    assert suffix_key_lookup(edges, "w", True, types).tolist() == [8.0, 7.0, 9.0]


def test_expand_of_the_only_type_needs_no_type_list():
    features = {"_N/feat": torch.tensor([1.0, 2.0]), "_TYPE": torch.zeros(2)}
    assert suffix_key_lookup(features, "feat", expand_to_all=True) is features["_N/feat"]


@pytest.mark.parametrize(
    "changed, types, message",
    [
        ({}, None, "type_list"),
        ({}, ["paper", "venue"], r"\['paper', 'venue'\]"),
        ({"author/feat": torch.zeros(3, 2)}, NAMES, "'author/feat' has shape"),
        ({"author/feat": torch.zeros(2, 2, dtype=torch.float64)}, NAMES, "'author/feat' has shape"),
    ],
)
def test_expand_refuses_what_does_not_fit_together(changed, types, message):
    with pytest.raises(FieldError, match=message):
        suffix_key_lookup(NODES | changed, "feat", True, types)


DATA = PartitionData([], [(0, 6)], NODES, NAMES, [])


def test_partition_data_finds_features_by_name_and_is_a_tuple():
    assert DATA["year"] is NODES["paper/year"]
    assert DATA["author/feat"] is NODES["author/feat"]
    with pytest.raises(FieldError, match="Name one of them with its type"):
        DATA["feat"]
    known = {key: key in DATA for key in ("year", "feat", "paper/year", "ear", 6)}
    assert [key for key, there in known.items() if not there] == ["ear", 6]
    edges, ranges, *_ = DATA
    assert DATA[0] is edges
    assert DATA[1:3] == (ranges, NODES)
    assert DATA._replace(directory="new").directory == "new"
