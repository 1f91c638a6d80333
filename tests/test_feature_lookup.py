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


def test_key_finds_the_whole_last_component():
    assert suffix_key_lookup(NODES, "my_feat") is NODES["paper/my_feat"]
    assert suffix_key_lookup(NODES, "year") is NODES["paper/year"]


def test_key_never_finds_a_mere_ending():
    only_long = {"paper/my_feat": torch.zeros(3), "my/other_feat": torch.zeros(3)}
    with pytest.raises(FieldError, match=r"no feature 'feat'.*'my/other_feat', 'paper/my_feat'"):
        suffix_key_lookup(only_long, "feat")


def test_key_with_type_and_bare_key_are_taken_as_they_stand():
    assert suffix_key_lookup(NODES, "author/feat") is NODES["author/feat"]
    both = {"feat": torch.zeros(4), "paper/feat": torch.ones(4)}
    assert suffix_key_lookup(both, "feat") is both["feat"]


def test_types_that_a_user_has_set_come_before_those_of_the_partition():
    homogeneous = {"_TYPE": torch.zeros(2), "_N/_TYPE": torch.tensor([3, 1])}  # as after dgl.to_homogeneous
    assert suffix_key_lookup(homogeneous, "_TYPE") is homogeneous["_N/_TYPE"]
    assert suffix_key_lookup(NODES, "_TYPE") is TYPES


def test_key_of_several_components_matches_all_of_them():
    deep = {"paper/raw/feat": torch.zeros(1), "author/cooked/feat": torch.ones(1)}
    assert suffix_key_lookup(deep, "raw/feat") is deep["paper/raw/feat"]
    with pytest.raises(FieldError):
        suffix_key_lookup(deep, "aw/feat")


def test_two_matches_are_an_error_that_lists_them():
    with pytest.raises(FieldError, match=r"\['paper/feat', 'author/feat'\]"):
        suffix_key_lookup(NODES, "feat")


def test_expand_puts_the_types_in_order_and_zeros_elsewhere():
    expected = [[1.0, 2.0], [-1.0, -2.0], [3.0, 4.0], [0.0, 0.0], [-3.0, -4.0], [5.0, 6.0]]
    assert suffix_key_lookup(NODES, "feat", expand_to_all=True, type_list=NAMES).tolist() == expected


def test_expand_keeps_the_dtype_and_works_for_one_type_of_several():
    years = suffix_key_lookup(NODES, "year", True, NAMES)
    assert years.dtype == torch.int64
    assert years.tolist() == [1998, 0, 2003, 0, 0, 2011]
    named = suffix_key_lookup(NODES, "author/feat", True, NAMES)
    assert named.tolist() == [[0.0, 0.0], [-1.0, -2.0], [0.0, 0.0], [0.0, 0.0], [-3.0, -4.0], [0.0, 0.0]]


def test_expand_accepts_canonical_edge_types():
    edges = {"_TYPE": torch.tensor([1, 0, 1]), "a:x:b/w": torch.tensor([7.0]), "b:y:a/w": torch.tensor([8.0, 9.0])}
    types = [("a", "x", "b"), ("b", "y", "a")]
    assert suffix_key_lookup(edges, "w", True, types).tolist() == [8.0, 7.0, 9.0]


@pytest.mark.parametrize("with_types", [False, True])
def test_expand_of_the_only_type_needs_no_type_list(with_types):
    features = {"_N/feat": torch.tensor([1.0, 2.0])} | ({"_TYPE": torch.zeros(2)} if with_types else {})
    assert suffix_key_lookup(features, "feat", expand_to_all=True) is features["_N/feat"]


def test_expand_without_type_list_is_an_error():
    with pytest.raises(FieldError, match="type_list"):
        suffix_key_lookup(NODES, "feat", expand_to_all=True)


def test_expand_refuses_types_that_are_not_listed():
    with pytest.raises(FieldError, match=r"\['paper', 'venue'\]"):
        suffix_key_lookup(NODES, "feat", True, ["paper", "venue"])


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.float64)],
    ids=("width", "rows", "dtype"),
)
def test_expand_refuses_features_that_do_not_fit_together(other):
    with pytest.raises(FieldError, match="'author/feat' has shape"):
        suffix_key_lookup(NODES | {"author/feat": other}, "feat", True, NAMES)


DATA = PartitionData([], [(0, 6)], NODES, NAMES, [])


def test_partition_data_finds_features_by_name():
    assert DATA["year"] is NODES["paper/year"]
    assert DATA["author/feat"] is NODES["author/feat"]
    with pytest.raises(FieldError, match="Name one of them with its type"):
        DATA["feat"]
    with pytest.raises(FieldError, match="no feature 'eat'"):
        DATA["eat"]


@pytest.mark.parametrize(
    "key, found", [("year", True), ("feat", True), ("paper/year", True), ("ear", False), (6, False)]
)
def test_partition_data_says_which_features_it_has(key, found):
    assert (key in DATA) is found


def test_partition_data_is_a_tuple_as_before():
    edges, ranges, *_ = DATA
    assert DATA[0] is edges
    assert DATA[1:3] == (ranges, NODES)
    assert DATA._replace(directory="new").directory == "new"
