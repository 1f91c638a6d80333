"""Runs the examples as scripts, as their first lines say, and as modules; and small graphs for them."""

import importlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sar.cli.demo import community_graph
from sar.partition.graph_source import GraphSource
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


def generated() -> Any:
    """A `DGLGraph` of 400 nodes in four classes, as the examples train on it."""
    import dgl

    data = community_graph(400, 4000, num_features=16, num_classes=4)
    graph = dgl.graph(tuple(map(torch.from_numpy, data.ends())), num_nodes=data.total_nodes)
    graph.ndata.update({name: torch.from_numpy(rows) for name, rows in data.node_data["_N"].items()})
    return example("partition_graph").prepare(graph)


def partition(graph: Any, folder: Path, parts: int = 2, script: str = "full_graph") -> list[str]:
    """Partition a graph of DGL with the example for that; the options that name the result to other examples."""
    import dgl

    file, out = folder / "graph.dgl", folder / "partitions"
    dgl.save_graphs(str(file), [graph])
    said = run("examples/partition_graph.py", "--graph", str(file), "--parts", str(parts), "--out", str(out))
    json_file = out / "partitions.json"
    assert f"torchrun --nproc-per-node {parts} examples/{script}.py --partition-json {json_file}" in said
    return ["--partition-json", str(json_file)]


def losses_in(said: str) -> list[float]:
    """The losses of all epochs that a script names."""
    found = re.findall(r"^epoch \d+: .*?loss (?:of the last batch )?([\d.]+)", said, re.MULTILINE)
    return list(map(float, found))


def train_alone(
    model: nn.Module, inputs: tuple[Any, ...], labels: Tensor, train: Tensor, arguments: Any, more: Any = ()
) -> tuple[list[float], Tensor]:
    """The losses of training on one machine, and the predictions after it; `more` are further parameters."""
    parameters = [*model.parameters(), *more]
    optimizer = torch.optim.Adam(parameters, lr=arguments.lr, weight_decay=arguments.weight_decay)
    losses = []
    for _ in range(arguments.epochs):
        loss = functional.cross_entropy(model(*inputs)[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, model(*inputs)


def in_double(graph: GraphSource) -> GraphSource:
    """A homogeneous graph with features in float64."""
    (fields,) = graph.node_data.values()
    return replace(graph, node_data={"_N": {**fields, "feat": fields["feat"][:].astype(np.float64)}})
