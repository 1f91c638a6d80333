"""Batches of rows that readers of tables in all formats make, and which of two columns names the sources of edges."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sar.errors import ConfigError, PartitionError

END_NAMES = (("src", "dst"), ("source", "destination"), ("source", "target"), ("src_id", "dst_id"))
_ROLES = (
    ("source", "src source from subject subj sender origin citing follower caller u"),
    ("destination", "dst dest target tgt to object obj receiver recipient cited followee callee v"),
    ("maybe source", "start head row s"),
    ("maybe destination", "end tail col column t d"),
)
"""Roles in edges and words for them; two words that may be meant either way never turn columns round."""

Kind = Literal["integers", "fractions", "booleans", "nodes", "ids"]
"""The values of a table that are asked for: a feature's, numbers of nodes, or IDs as they stand there."""


class NotNumbersError(PartitionError):
    """A feature has values that are no numbers of the type asked for."""


class Batch(NamedTuple):
    """Some rows of a table."""

    columns: list[Any]  # numbers as numpy arrays, (n,) or (n, F); IDs as pyarrow arrays of strings or integers, (n,)
    where: Callable[[int], str]  # describes a row, by its number among these, for errors


def order_of_two(path: Path, names: Sequence[str], types: tuple[str, str], note: Callable[[str], None]) -> list[int]:
    """The numbers of two columns, sources first, if names allow only one order; else `ConfigError`.

    `types` are the node types of sources and destinations, which may also name their columns. `note` takes a remark on
    names that tell nothing.
    """
    roles = [_roles(name, types if types[0] != types[1] else ("", "")) for name in names]
    if roles == [{"destination"}, {"source"}]:
        return [1, 0]
    first, second = ({role.split()[-1] for role in some} for some in roles)
    is_unknown = not first | second
    template = [re.sub(r"\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])", "", name) for name in names]
    is_counted_down = template[0] == template[1] and (len(names[0]), names[0]) > (len(names[1]), names[1])
    if "destination" in first or "source" in second or (is_unknown and is_counted_down):
        raise ConfigError(
            f"{path} has the columns {names[0]!r} and {names[1]!r}, which do not tell sources from destinations. Name "
            f"them in this order: --columns '{names[0]}' '{names[1]}', or the other way round."
        )
    if is_unknown:
        note(f"{path}: the first column, {names[0]!r}, was taken for sources (--columns).")
    return [0, 1]


def _roles(name: str, types: tuple[str, str]) -> set[str]:
    """The roles that a name such as `FromNodeId` or `source_id` tells."""
    words = [word.casefold() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    found = {role for role, known in _ROLES for word in words if word in known.split()}
    for (role, known), ntype in zip(_ROLES, types, strict=False):
        prefixes = tuple(one for one in (*known.split(), ntype.casefold()) if len(one) > 2)
        found |= {role} if any(word.startswith(prefixes) for word in words) else set()
    return found
