"""The methods that assign nodes to parts, by name; one is imported when it is asked for.

A method is a function from `AssignmentTask` to parts. Other packages add theirs by entry points of the group
`sar.partition_methods`.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from sar.errors import ConfigError
from sar.partition.assign.assignment import Method

METHODS = {
    "random": "sar.partition.assign.random:random",
    "spring": "sar.partition.assign.spring:spring",
    "ldg": "sar.partition.assign.ldg:ldg",
    "multilevel": "sar.partition.assign.multilevel:multilevel",
    "metis": "sar.partition.assign.metis:metis",
    "auto": "sar.partition.assign.auto:auto",
}
"""`module:function` of the methods that are there without an entry point, so that `auto` can rely on them."""

ENTRY_POINTS = "sar.partition_methods"
"""Group of the entry points by which packages add methods."""


def method_named(name: str) -> Method:
    """The method of this name: one of `METHODS`, or an entry point of an installed package.

    Args:
        name: for instance `spring`; names in `METHODS` go before entry points.

    Raises:
        ConfigError: there is no such method, or the package that brings it cannot be imported.
    """
    if name in METHODS:
        module, function = METHODS[name].split(":")
        return cast(Method, getattr(import_module(module), function))
    for point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            return cast(Method, point.load())
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"partition method '{name}' is '{point.value}', which cannot be imported: {error}; "
                "repair or remove the package that registers it."
            ) from error
    raise ConfigError(f"there is no partition method '{name}'; expected one of {', '.join(method_names())}.")


def method_names() -> list[str]:
    """The names that `method_named` knows."""
    return list(dict.fromkeys([*METHODS, *sorted(entry_points(group=ENTRY_POINTS).names)]))
