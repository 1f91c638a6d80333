"""`sar infer`: a trained model's outputs for the nodes of a partition directory."""

import argparse
import time

from sar.cli.model_file import load_model
from sar.comm import session
from sar.errors import ConfigError
from sar.outofcore.workers import initialize_comms
from sar.partition.ingest.tables import read_node_list
from sar.train.inference import infer


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
