"""`sar plan`: what training a model on a partition directory would take."""

import argparse
import json
from pathlib import Path

import torch

from sar.adapters.dgl.layers.patch import patch_dgl
from sar.cli.sizes import parse_bytes
from sar.errors import ConfigError
from sar.host.memory import PeakMemory
from sar.kernels import load_kernels
from sar.partition.inspect.inspection import inspect_directory, largest_value
from sar.partition.inspect.report import DirectoryReport
from sar.train.model_shape import ModelShape
from sar.train.plan import plan_training

HELP = "Predict bytes sent and peak memory of every worker for a model on a partition directory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar plan` takes."""
    parser.add_argument("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    parser.add_argument("--model", choices=["sage", "gcn", "gat"], default="sage", help="layers (%(default)s)")
    parser.add_argument("--layers", type=int, default=3, metavar="L", help="(%(default)s)")
    parser.add_argument(
        "--hidden", type=int, default=256, metavar="D", help="hidden width, of gat of all heads together (%(default)s)"
    )
    parser.add_argument("--heads", type=int, default=4, metavar="H", help="of gat (%(default)s)")
    parser.add_argument("--features", type=int, metavar="F", help="input width; default: that of the feature 'feat'")
    parser.add_argument("--classes", type=int, metavar="C", help="default: one more than the greatest 'label'")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help="of one worker, such as 8GiB: how many fit?")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit status is 1 where the directory is not sound."""
    if arguments.layers < 1:
        raise ConfigError(f"--layers {arguments.layers}: expected at least 1.")
    process = _process_bytes()
    report = inspect_directory(arguments.directory)
    if report.problems:
        raise ConfigError(f"the directory is not sound, see `sar inspect`. {report.problems[0]}")
    widths = (
        _width(report) if arguments.features is None else arguments.features,
        *[arguments.hidden] * (arguments.layers - 1),
        _classes(arguments.directory, report) if arguments.classes is None else arguments.classes,
    )
    model = ModelShape(arguments.model, widths, arguments.heads)
    plan = plan_training(report, model, memory=arguments.memory, process=process)
    print(json.dumps(plan.summary()) if arguments.json else plan.as_text())
    return 0


def _process_bytes() -> int:
    """What a worker's code takes, taken from this process, before it reads any partition."""
    patch_dgl()
    load_kernels()
    torch.optim.Adam([torch.zeros(1)])  # the first optimiser loads more of torch
    return PeakMemory().start


def _width(report: DirectoryReport) -> int:
    """Width of the feature `feat`."""
    found = [one.shape for one in report.features if (one.of, one.name) == ("nodes", "feat") and len(one.shape) == 1]
    if not found:
        raise ConfigError("there is no node feature 'feat' of one dimension; say how wide the input is: --features F.")
    return int(found[0][0])


def _classes(directory: Path, report: DirectoryReport) -> int:
    """How many labels there are."""
    if not any((one.of, one.name, one.shape) == ("nodes", "label", ()) for one in report.features):
        raise ConfigError("there is no node feature 'label'; say how many classes there are: --classes C.")
    return int(largest_value(directory, "label")) + 1
