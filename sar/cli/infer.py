"""`sar infer`: a trained model's outputs for the nodes of a partition directory."""

import argparse
import time
from pathlib import Path

from sar.cli.graph_input import size
from sar.cli.model_file import load_model
from sar.comm import session
from sar.errors import ConfigError
from sar.outofcore.workers import initialize_comms
from sar.partition.ingest.tables import read_node_list
from sar.train.inference import infer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sar infer`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    model = "a function that makes the model, FILE.py:FUNCTION, as for sar plan"
    add("--model", required=True, metavar="FILE.py:FUNCTION", help=model)
    add("--weights", type=Path, required=True, metavar="FILE", help="a state dict, as sar.save_model writes it")
    out = "an .npy file, in the order of the input; or a .parquet file, with a column of IDs"
    add("--out", type=Path, required=True, metavar="FILE", help=out)
    nodes = "write these only: IDs in .npy (S,), Parquet, or text such as CSV; of several columns FILE#COLUMN"
    add("--nodes", metavar="FILE", help=nodes)
    add("--header", action=argparse.BooleanOptionalAction, help="whether text begins with names of columns (found out)")
    add("--ntype", help="node type of the outputs; may be left out if there is one")
    add("--classes", type=int, metavar="C", help="of the model; default: one more than the greatest label")
    workers = "workers of this process, which take turns; default: one for each partition. 1 has all in memory"
    add("--workers", type=int, metavar="W", help=workers)
    memory = "for all workers of this machine, such as 5GiB; default: what there is"
    add("--memory", type=size, metavar="SIZE", help=memory)
    add("--spill", type=Path, metavar="DIR", help="a folder on a disk for waiting workers; default: that of --out")


def run(arguments: argparse.Namespace) -> int:
    """Write the outputs, and return 0."""
    if not arguments.out.parent.is_dir():
        raise ConfigError(f"--out {arguments.out}: there is no folder {arguments.out.parent}; make it first.")
    if arguments.workers is not None and arguments.workers < 1:
        raise ConfigError(f"--workers {arguments.workers}: expected at least 1.")
    start = time.perf_counter()
    nodes = None if arguments.nodes is None else read_node_list(arguments.nodes, arguments.header)
    make_model = load_model(arguments.model)
    initialize_comms()
    infer(
        arguments.directory,
        make_model,
        arguments.weights,
        nodes,
        out=arguments.out,
        ntype=arguments.ntype,
        num_classes=arguments.classes,
        workers=arguments.workers,
        spill=arguments.spill or arguments.out.parent,
        memory=arguments.memory,
    )
    if session.rank() == 0:
        print(f"wrote {arguments.out} in {time.perf_counter() - start:.1f} s")
    return 0
