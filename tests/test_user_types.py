"""What users write passes `mypy --strict`: fields, scopes, relations and types of nodes and edges."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import REPOSITORY

SCRIPT = """
from typing import cast

from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Module
from torch.optim import Optimizer

import sar


def fields(data: sar.PartitionData, x: Tensor) -> Tensor:
    g = sar.construct_full_graph(data)
    g.srcdata["h"] = x
    with g.local_scope():
        g.ndata["h"] = g.ndata["h"] + 1
        g.dstdata["h"] = g.srcdata["h"] * 2
        g.edata["w"] = g.edata["w"].float() / g.edata.pop("norm")
        for name, values in g.ndata.items():
            print(name, values.shape)
        g.edata.update(weight=x)
    return g.dstdata["h"]


def fields_of_types(data: sar.PartitionData, x: Tensor) -> Tensor:
    g = sar.construct_full_graph(data)
    g.nodes["paper"].data["h"] = x
    g.srcnodes["paper"].data["h"] = g.dstnodes["author"].data["h"] + 1
    weight = g.edges["cites"].data["w"]
    g.edges["paper", "cites", "paper"].data["w"] = weight + g.nodes["paper"].data["h"]
    g.srcdata["h"] = {"paper": x}
    by_type = cast("dict[str, Tensor]", g.ndata["h"])
    return by_type["paper"] + g.nodes("paper")


def graphs(data: sar.PartitionData, seeds: Tensor) -> list[sar.GraphShardManager]:
    g = sar.construct_full_graph(data)
    block: sar.DistributedBlock = g["cites"].to("cpu").local_var().get_full_partition_graph()
    layers = sar.construct_mfgs(data, seeds, n_layers=2)
    layers[0].srcdata["h"] = block.srcdata["h"][layers[0].input_nodes] + block.num_nodes()
    return layers


def helpers(data: sar.PartitionData, model: Module, optimizer: Optimizer) -> float:
    sar.seed(0)
    task, stop = sar.Task.of(data), sar.EarlyStopping(patience=5, mode="min")
    sar.load_checkpoint("checkpoints", model=model, optimizer=optimizer, loaders=stop, missing_ok=True)
    logits: Tensor = model(sar.construct_full_graph(data), data["feat"])
    loss = task.loss(logits)
    if stop.step(sar.all_sum(loss.item()), model):
        stop.load_best(model)
    right, count = sar.all_sum((1, 2.0))
    sar.print(sar.all_sum(loss) + sar.all_max(logits), right / count, end="")
    return task.accuracy(logits, "val") + task.metrics(logits)["test"]["f1_macro"]


def train(path: str, model: Module) -> Tensor:
    sar.initialize_comms()
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    x = sar.suffix_key_lookup(data.node_features, "feat")
    g = sar.construct_full_graph(data)
    sar.sync_params(model)
    sampler = sar.DistNeighborSampler([10, 10], input_node_features={"feat": x})
    for blocks in sar.DataLoader(g, x, sampler, batch_size=10, shuffle=True):
        print(blocks[0])
    loss: Tensor = model(g, x)
    sar.gather_grads(model)
    sar.comm.all_reduce(loss, ReduceOp.SUM)
    return sar.edge_softmax(g, g.edata["w"]) * loss
"""


def mypy(folder: Path, *arguments: str) -> str:
    """What mypy says of users' files in a folder; sar is found as an installed package would be."""
    cache = REPOSITORY / ".mypy_cache" / ("users_strictly" if "--strict" in arguments else "users")
    command = [sys.executable, "-m", "mypy", *arguments, "--no-error-summary", "--follow-imports=silent"]
    # The cache outlasts the test, because mypy takes twenty seconds to read torch; each set of options needs its own.
    command += ["--config-file=", f"--cache-dir={cache}"]
    environment = {**os.environ, "MYPYPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    return done.stdout + done.stderr


def test_a_users_script_is_well_typed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert mypy(tmp_path, "--strict", "script.py") == ""


@pytest.mark.parametrize(
    "line, error",
    [
        ("g.ndata['h'] = 1", "[assignment]"),
        ("g.ndata['h'].paper", "[attr-defined]"),
        ("g.nodes['paper'].data[0]", "[index]"),
        ("g.srcdata = {}", "[misc]"),
    ],
)
def test_mistakes_in_a_users_script_are_found(tmp_path, line, error):
    (tmp_path / "script.py").write_text(f"import sar\n\ndef use(g: sar.GraphShardManager) -> None:\n    {line}\n")
    assert error in mypy(tmp_path, "--strict", "script.py")


@pytest.mark.slow
def test_the_examples_are_well_typed():
    folder = REPOSITORY / "examples"
    files = [path.name for path in sorted(folder.glob("*.py"))]
    assert len(files) > 5
    # Not strict: models are written without annotations, and DGL has no types.
    assert mypy(folder, "--check-untyped-defs", "--ignore-missing-imports", *files) == ""
