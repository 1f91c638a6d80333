"""Arguments and the progress bar of commands that read a graph."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from sar.errors import ConfigError
from sar.logging_setup import told_on_stderr
from sar.partition.assign.assigning import AssigningOptions
from sar.partition.graph_source import GraphSource, Progress, logged_stages
from sar.partition.ingest.sources import METADATA
from sar.partition.pipeline import read_input
from sar.partition.write.write_job import OutputOptions

_TYPED = re.compile(r"([^:=]+:[^:=]+:[^:=]+)=(.+)")
T = TypeVar("T", AssigningOptions, OutputOptions)


def options_of(kind: type[T], arguments: argparse.Namespace, **converted: Any) -> T:
    """Create options from the arguments of the same names, with `converted` ones replaced."""
    given = {one.name: getattr(arguments, one.name) for one in fields(kind) if one.name not in converted}
    return kind(**given, **converted)


def input_of(
    arguments: argparse.Namespace, progress: Progress = lambda doing, share: None
) -> Callable[[Path], GraphSource]:
    """Return a function that reads the input with the options of `_add_input`, given a directory for copies."""
    as_given = ("format", "delimiter", "header", "allow_nan", "ids")
    return partial(
        read_input,
        _path(arguments.input),
        **{name: getattr(arguments, name) for name in (*as_given, "split", "seed", "memory")},
        cleaning={
            "undirected": arguments.undirected,
            "remove_duplicates": arguments.remove_duplicates,
            "self_loops": "add" if arguments.add_self_loops else "remove" if arguments.remove_self_loops else "keep",
        },
        num_nodes=_num_nodes(arguments.num_nodes),
        train_nodes=_node_lists("--train-nodes", arguments.train_nodes),
        val_nodes=_node_lists("--val-nodes", arguments.val_nodes),
        test_nodes=_node_lists("--test-nodes", arguments.test_nodes),
        node_features=_named("--node-feature", arguments.node_feature),
        edge_features=_named("--edge-feature", arguments.edge_feature),
        columns=tuple(arguments.columns or ()) or None,
        progress=progress,
    )


def default_name(arguments: argparse.Namespace) -> str:
    """The value of `--name`, or the name of the first input file; empty for chunked graphs, which contain a name."""
    file = Path(_TYPED.sub(r"\2", arguments.input[0])).absolute()
    if arguments.name or file.name == METADATA or (file / METADATA).is_file():
        return arguments.name or ""
    return file.name.partition(".")[0]


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show the progress of stages, as bars on a terminal, otherwise as log lines."""
    if not sys.stderr.isatty():
        with told_on_stderr():
            yield logged_stages()
        return
    with tqdm(total=1.0, bar_format="{desc:40} {percentage:3.0f}% |{bar}| {elapsed}", leave=False) as bar:

        def show(doing: str, share: float) -> None:
            if doing != bar.desc:
                bar.reset()
                bar.set_description_str(doing, refresh=False)
            bar.update(share - bar.n)

        yield show


def _path(inputs: Sequence[str]) -> str | list[str] | dict[str, str]:
    """One input, several files, or files by edge type."""
    typed = [_TYPED.fullmatch(one) for one in inputs]
    if all(typed):
        return _named("INPUT", inputs)
    if any(typed):
        untyped = [one for one, match in zip(inputs, typed, strict=True) if match is None]
        raise ConfigError(f"{', '.join(untyped)}: expected NTYPE:RELATION:NTYPE=FILE, as in the other inputs.")
    return inputs[0] if len(inputs) == 1 else list(inputs)


def _num_nodes(given: Sequence[str]) -> int | dict[str, int] | None:
    """One number, or one by type."""
    one = len(given) == 1 and "=" not in given[0]
    named = {"": given[0]} if one else _named("--num-nodes", given)
    try:
        counts = {ntype: int(count) for ntype, count in named.items()}
    except ValueError as error:
        raise ConfigError(
            f"--num-nodes {' '.join(given)}: expected a number, or NTYPE=NUMBER for each type."
        ) from error
    return counts[""] if one else counts or None


def _node_lists(option: str, given: Sequence[str]) -> str | dict[str, str] | None:
    """One file, or one by node type."""
    if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()):
        return given[0]
    return _named(option, given) or None


def _named(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE arguments into values by name."""
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {pair}: expected NAME=VALUE.")
        if name in named:
            raise ConfigError(f"{option} {pair}: there is {named[name]} for {name} already; name each once.")
        named[name] = value
    return named
