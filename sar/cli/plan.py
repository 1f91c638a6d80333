"""`sar plan`: what training a model on a partition directory would take."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from sar.adapters.dgl.layers.models import KINDS, LayerStack
from sar.adapters.dgl.layers.patch import patch_dgl
from sar.cli.sizes import parse_bytes
from sar.errors import ConfigError
from sar.host.memory import PeakMemory
from sar.kernels import load_kernels
from sar.train.footprint import plan_training
from sar.train.graph_counts import GraphInfo, count_graph
from sar.train.trial_epoch import MakeModel

HELP = "Predict bytes sent and peak memory of every worker for a model on a partition directory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar plan` takes."""
    parser.add_argument("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    parser.add_argument(
        "--model",
        default="sage",
        metavar="MODEL",
        help="sage, gcn or gat, or FILE.py:FUNCTION, which returns a module when called with the graph's types and "
        "widths (sar.train.graph_counts.GraphInfo) (%(default)s)",
    )
    built_in = parser.add_argument_group("of sage, gcn and gat")
    built_in.add_argument("--layers", type=int, default=3, metavar="L", help="(%(default)s)")
    built_in.add_argument(
        "--hidden", type=int, default=256, metavar="D", help="hidden width, of gat of all heads together (%(default)s)"
    )
    built_in.add_argument("--heads", type=int, default=4, metavar="H", help="of gat (%(default)s)")
    parser.add_argument("--features", type=int, metavar="F", help="input width; default: that of the feature 'feat'")
    parser.add_argument("--classes", type=int, metavar="C", help="default: one more than the greatest 'label'")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help="of one worker, such as 8GiB: how many fit?")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit status is 1 where the directory is not sound."""
    if arguments.layers < 1:
        raise ConfigError(f"--layers {arguments.layers}: expected at least 1.")
    process = _process_bytes()
    counts = count_graph(arguments.directory, in_width=arguments.features, num_classes=arguments.classes)
    if arguments.model in KINDS:
        widths = _widths(counts.info, arguments)
        described: dict[str, Any] = {"kind": arguments.model, "widths": widths, "heads": arguments.heads}
        title = f"{arguments.model}, widths {' -> '.join(map(str, widths))}"
        plan = plan_training(counts, lambda _: LayerStack(arguments.model, widths, arguments.heads), process=process)
    else:
        described, title = {"source": arguments.model}, arguments.model
        plan = plan_training(counts, _load(arguments.model), process=process)
    if arguments.json:
        found = {"model": described} | plan.summary()
        if arguments.memory is not None:
            found |= {"memory": arguments.memory, "fewest_workers": plan.fewest_workers(arguments.memory)}
        print(json.dumps(found))
    else:
        print(f"{title}, mode 1, freed memory given back\n\n{plan.as_text()}")
        if arguments.memory is not None:
            print(f"\n{plan.advice(arguments.memory)}")
    return 0


def _process_bytes() -> int:
    """What a worker's code takes, taken from this process, before it reads any partition."""
    patch_dgl()
    load_kernels()
    torch.optim.Adam([torch.zeros(1)])  # the first optimiser loads more of torch
    return PeakMemory().start


def _widths(info: GraphInfo, arguments: argparse.Namespace) -> list[int]:
    """Of the layers of one of our own models."""
    if len(info.ntypes) > 1 or len(info.canonical_etypes) > 1:
        raise ConfigError(
            f"the graph has {len(info.ntypes)} node types and {len(info.canonical_etypes)} edge types, but "
            f"{arguments.model} is for one of each; plan a model of your own: --model FILE.py:FUNCTION."
        )
    return [info.in_widths[info.ntypes[0]], *[arguments.hidden] * (arguments.layers - 1), info.num_classes]


def _load(source: str) -> MakeModel:
    """The function that FILE.py:FUNCTION names."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name:
        raise ConfigError(f"--model {source}: expected one of {', '.join(KINDS)}, or FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--model {source}: there is no file {path}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make_model: MakeModel | None = getattr(module, name, None)
    if not callable(make_model):
        raise ConfigError(f"--model {source}: {path} defines no function {name!r}.")
    return make_model
