"""Partition methods that assign edges, to compare sar's own with: what SDT-GNN compares SPRING with."""

from importlib import import_module
from typing import cast

from sar.partition.assign import assigning
from sar.partition.assign.task import Method

EDGE_PARTITIONERS = {
    "dbh": "dbh:dbh",
    "greedy": "greedy:greedy",
    "hdrf": "hdrf:hdrf",
    "2ps-l": "two_phase:two_phase",
}
"""`module:function` of each, within this folder."""


def method_names() -> list[str]:
    """The methods of sar, each by one name, and these."""
    return [*(name for name in assigning.method_names() if name != "metis"), *EDGE_PARTITIONERS]


def method_named(name: str) -> Method:
    """One of these, or of sar's."""
    if name not in EDGE_PARTITIONERS:
        return assigning.method_named(name)
    module, function = EDGE_PARTITIONERS[name].split(":")
    return cast(Method, getattr(import_module(f"{__name__}.{module}"), function))
