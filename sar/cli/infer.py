"""`sar infer`: a trained model's outputs for some nodes of a partition directory."""

import argparse
import io
import time
from pathlib import Path

import numpy as np

from sar.cli.model_file import load_model
from sar.errors import ConfigError
from sar.partition.ingest.arrow import read_node_list
from sar.train.inference import infer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sar infer`."""
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    model = "a function that makes the model, FILE.py:FUNCTION, as for sar plan"
    add("--model", required=True, metavar="FILE.py:FUNCTION", help=model)
    add("--weights", type=Path, required=True, metavar="FILE", help="a state dict, as sar.save_model writes it")
    nodes = (
        "IDs of the nodes in the input graph: .npy (S,), Parquet, or text such as CSV; of several columns FILE#COLUMN"
    )
    add("--nodes", required=True, metavar="FILE", help=nodes)
    add("--header", action=argparse.BooleanOptionalAction, help="whether text begins with names of columns (found out)")
    add("--out", type=Path, required=True, metavar="NPY", help="for the outputs, (S, ...)")
    add("--classes", type=int, metavar="C", help="of the model; default: one more than the greatest label")
    add("--ntype", help="node type of the nodes; may be left out if there is one")
    add(
        "--hops", type=int, metavar="K", help="how far an output looks; default: as many as there are distributed calls"
    )
    check = "compare N of the nodes with outputs on the whole graph, which has to fit into memory"
    add("--check", type=int, default=0, metavar="N", help=check)


def run(arguments: argparse.Namespace) -> int:
    """Write the outputs, and return 0."""
    if arguments.nodes.endswith(".npy"):
        try:
            with open(arguments.nodes, "rb") as file:
                nodes = np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            pickled = ": it holds pickled objects, which can run code. Save integers or strings."
            why = pickled if "allow_pickle" in str(error) else f" as an .npy file: {error}"
            raise ConfigError(f"--nodes {arguments.nodes} cannot be read{why}") from error
    else:
        nodes = read_node_list(arguments.nodes, arguments.header)
    if not arguments.out.parent.is_dir():
        raise ConfigError(f"--out {arguments.out}: there is no folder {arguments.out.parent}; make it first.")
    start = time.perf_counter()
    found = infer(
        arguments.directory,
        load_model(arguments.model),
        arguments.weights,
        nodes,
        ntype=arguments.ntype,
        hops=arguments.hops,
        num_classes=arguments.classes,
        check=arguments.check,
    )
    np.save(content := io.BytesIO(), found)  # straight into the file it says nothing of a disk that its end fills
    try:
        with arguments.out.open("wb") as file:
            try:
                file.write(content.getbuffer())
                file.flush()
            except OSError:
                if arguments.out.is_file():  # not a device
                    arguments.out.unlink()
                raise
    except OSError as error:
        raise ConfigError(f"--out {arguments.out} cannot be written ({error}); make room, or name another.") from error
    print(f"wrote {arguments.out}, {found.dtype} {found.shape}, in {time.perf_counter() - start:.1f} s")
    return 0
