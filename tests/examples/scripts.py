"""Runs the examples as scripts, as their first lines say, and as modules; and small partitioned graphs for them."""

import importlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sar.cli.demo import community_graph
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import training_graph
from sar.partition.ingest.chunked import write_chunked
from sar.partition.ingest.open import open_graph
from tests import python_process
from tests.workers import REPOSITORY

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(*arguments: str) -> str:
    """The output of Python with these arguments, which has four minutes."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = python_process.run(*arguments, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str) -> Any:
    """An example as a module, which finds its neighbours as it does when it is run."""
    folder = str(REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def generated(folder: Path, **options: Any) -> Path:
    """The files of a graph of 400 nodes, of four classes by default."""
    graph = community_graph(400, 4000, num_features=16, **{"num_classes": 4} | options)
    return write_chunked(graph, folder / "generated").parent


def in_memory(file: Path) -> GraphSource:
    """The graph of a file as the examples train on it, with its features in memory."""
    graph = training_graph(open_graph(file, file.parent / "scratch"))
    fields = {ntype: {key: column[:] for key, column in of.items()} for ntype, of in graph.node_data.items()}
    return replace(graph, node_data=fields)


def partition(file: Path, folder: Path, parts: int = 2, script: str = "full_graph", *options: str) -> list[str]:
    """Partition the graph of a file with the example for that; the options that name the result to other examples."""
    options = ("--dataset", str(file), "--parts", str(parts), "--out", str(folder / "partitions"), *options)
    said = run("examples/partition_graph.py", *options)
    json_file = folder / "partitions" / f"{file.stem}.json"
    assert f"torchrun --nproc-per-node {parts} examples/{script}.py --partition-json {json_file}" in said
    return ["--partition-json", str(json_file)]


def losses_in(said: str) -> list[float]:
    """The losses of all epochs that a script names."""
    found = re.findall(r"^epoch \d+: .*?loss (?:of the last batch )?([\d.]+)", said, re.MULTILINE)
    return list(map(float, found))


def in_double(graph: GraphSource) -> GraphSource:
    """A homogeneous graph with features in float64."""
    (fields,) = graph.node_data.values()
    return replace(graph, node_data={"_N": {**fields, "feat": fields["feat"][:].astype(np.float64)}})
