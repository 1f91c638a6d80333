"""What commands that plan training take to say which model, and how they make it."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from sar.adapters.dgl.models import KINDS, LayerStack
from sar.adapters.dgl.patched_layers import patch_dgl
from sar.adapters.dgl.shim import has_dgl
from sar.errors import ConfigError
from sar.host.memory import PeakMemory
from sar.kernels import load_kernels
from sar.train.graph_counts import GraphInfo
from sar.train.trial_epoch import MakeModel


def add_model(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", default: str | None = None) -> None:
    """Declare the model, its widths, and partitions of which one is in memory at a time."""
    add = parser.add_argument
    add(
        "--model",
        default=default,
        metavar="MODEL",
        help="sage, gcn or gat, or FILE.py:FUNCTION, which returns a module when called with the graph's types and "
        f"widths (sar.train.graph_counts.GraphInfo){f' ({default})' if default else ''}",
    )
    add("--layers", type=int, default=3, metavar="L", help="of sage, gcn and gat (%(default)s)")
    add("--hidden", type=int, default=256, metavar="D", help="their width, of gat of all heads together (%(default)s)")
    add("--heads", type=int, default=4, metavar="H", help="of gat (%(default)s)")
    add("--features", type=int, metavar="F", help="input width; default: that of the feature 'feat'")
    add("--classes", type=int, metavar="C", help="default: one more than the greatest 'label'")
    add("--resident", type=int, choices=[1], metavar="1", help="partitions in memory at a time, as in sar launch")


def model_of(arguments: argparse.Namespace) -> MakeModel:
    """What makes the model that the arguments describe; `ConfigError` where there is no such model."""
    if arguments.layers < 1:
        raise ConfigError(f"--layers {arguments.layers}: expected at least 1.")
    if arguments.model in KINDS:
        return lambda info: LayerStack(arguments.model, widths_of(info, arguments), arguments.heads)
    return load_model(arguments.model, KINDS)


def process_bytes() -> int:
    """What a worker's code takes, taken from this process, before it reads any graph."""
    if has_dgl():
        patch_dgl()
    load_kernels()
    torch.optim.Adam([torch.zeros(1)])  # the first optimiser loads more of torch
    return PeakMemory().baseline


def widths_of(info: GraphInfo, arguments: argparse.Namespace) -> list[int]:
    """Of the layers of one of our own models."""
    if len(info.ntypes) > 1 or len(info.canonical_etypes) > 1:
        raise ConfigError(
            f"the graph has {len(info.ntypes)} node types and {len(info.canonical_etypes)} edge types, but "
            f"{arguments.model} is for one of each; plan a model of your own: --model FILE.py:FUNCTION."
        )
    return [info.in_widths[info.ntypes[0]], *[arguments.hidden] * (arguments.layers - 1), info.num_classes]


def load_model(source: str, kinds: Sequence[str] = ()) -> MakeModel:
    """The function that FILE.py:FUNCTION names; `kinds` are what else the user might have named."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name:
        one_of = f"one of {', '.join(kinds)}, or " if kinds else ""
        raise ConfigError(f"--model {source}: expected {one_of}FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--model {source}: there is no file {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # where dataclasses look themselves up
    sys.path.insert(0, str(path.absolute().parent))  # as for a script that is run
    spec.loader.exec_module(module)
    make_model: MakeModel | None = getattr(module, name, None)
    if not callable(make_model):
        raise ConfigError(f"--model {source}: {path} defines no function {name!r}.")
    return make_model
