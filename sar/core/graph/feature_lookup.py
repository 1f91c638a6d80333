"""Look up features in the dictionaries of `PartitionData`, whose keys are `type/name`."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sar.common_tuples import NTYPE, CanonicalEtype
from sar.errors import FieldError


def suffix_key_lookup(
    feature_dict: Mapping[str, Tensor],
    key: str,
    expand_to_all: bool = False,
    type_list: Sequence[str | CanonicalEtype] | None = None,
) -> Tensor:
    """Find the feature `type/key` without naming the type.

    `feat` finds `paper/feat` and `feat`, never `paper/my_feat`; a key that is there as it stands is taken as it stands.

    Args:
        feature_dict: `PartitionData.node_features`, or the `edge_features` of a shard.
        key: name of the feature, with or without its type.
        expand_to_all: return a row for every node (or edge), with zeros for the types that lack the feature.
        type_list: `node_type_names` (`edge_type_names`) of the `PartitionData`; needed for `expand_to_all` unless there
            is one type only.

    Returns:
        The rows of one type, (N_type, ...); with `expand_to_all` those of all types, (N, ...), in node (edge) order.

    Raises:
        FieldError: no feature matches, or several do.
    """
    matches = [key] if key in feature_dict else [name for name in feature_dict if name.endswith(f"/{key}")]
    if not matches:
        raise FieldError(f"There is no feature {key!r}; expected one of {sorted(feature_dict)}.")
    if expand_to_all:
        return _expand(feature_dict, key, matches, type_list)
    if len(matches) > 1:
        raise FieldError(f"Several features are called {key!r}: {matches}. Name one of them with its type.")
    return feature_dict[matches[0]]


def _expand(
    feature_dict: Mapping[str, Tensor], key: str, matches: list[str], type_list: Sequence[str | CanonicalEtype] | None
) -> Tensor:
    """The matches side by side: rows in the order of `_TYPE`, zeros where a type has no match."""
    first = feature_dict[matches[0]]
    types = feature_dict.get(NTYPE)
    if len(matches) == 1 and (types is None or len(first) == len(types)):
        return first
    if types is None or type_list is None:
        raise FieldError(
            f"Expanding {matches} to all types needs {NTYPE!r} among the features and type_list; found "
            f"{'no type_list' if types is not None else sorted(feature_dict)}. Pass type_list=data.node_type_names."
        )
    names = [name if isinstance(name, str) else ":".join(name) for name in type_list]
    owners = [match.partition("/")[0] for match in matches]
    if len(set(owners)) < len(owners) or not set(owners) <= set(names):
        raise FieldError(f"{key!r} matches {matches}; expected one feature at most of each of the types {names}.")
    result = first.new_zeros((len(types), *first.shape[1:]))
    for match, owner in zip(matches, owners, strict=True):
        feature, rows = feature_dict[match], types == names.index(owner)
        if feature.dtype != first.dtype or feature.shape != (int(rows.sum()), *first.shape[1:]):
            raise FieldError(
                f"{match!r} has shape {tuple(feature.shape)} and dtype {feature.dtype}; expected {int(rows.sum())} "
                f"rows of shape {tuple(first.shape[1:])} and dtype {first.dtype}, as {matches[0]!r} has them."
            )
        result[rows] = feature
    return result
