"""What a plan says of partitions in turns, against what virtual workers write, read and hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import sar
from sar.adapters.dgl.layers.models import LayerStack
from sar.adapters.dgl.shim import require_dgl
from sar.cli import main, model_options
from sar.comm import session
from sar.comm.virtual import residency
from sar.comm.virtual.spill import DiskBandwidth
from sar.partition.assign.assigning import AssigningOptions, assign
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.in_memory import divide
from sar.train.footprint import FIRST_EPOCH, plan_training
from sar.train.graph_counts import GraphInfo, count_graph
from sar.train.parts_rule import FootprintRule
from sar.train.source_counts import count_source
from sar.train.turns_plan import WAITING, TurnsPlan, TurnsSearch, plan_turns
from tests.matrix import corner
from tests.train.test_footprint import KINDS, Mixed, patched_dgl, random_graph  # noqa: F401  a fixture
from tests.virtual.virtual_pool import VirtualPool

WIDTHS = (32, 64, 64, 16)
GRAPH = random_graph(3000, 30_000, WIDTHS[0])
DISK = DiskBandwidth(1e8, 2e8)


def model_of(kind: str) -> Any:
    return Mixed if kind == "mixed" else lambda info: LayerStack(kind, WIDTHS, 4)  # type: ignore[arg-type]


def counted(json_file: str, kind: str) -> tuple[int, int]:
    """Bytes written, and read in the second epoch of a virtual worker."""
    residency.LEAST_BYTES = 2**13  # as outside of tests
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(json_file, sar.rank(), "cpu")
    x, labels, mask = (data.node_features[f"_N/{name}"] for name in ("feat", "label", "train_mask"))
    mask, graph = mask.bool(), sar.construct_full_graph(data)
    del data
    model = model_of(kind)(GraphInfo(["_N"], graph.canonical_etypes, {}, {"_N": x.shape[1]}, WIDTHS[-1]))
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters())
    group: Any = session.current_group()
    file = group.residency.file
    before = 0, 0
    for _ in range(2):
        before = file.written, file.read
        loss = functional.cross_entropy(model(graph, x)[mask], labels[mask], reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
    sar.unpatch_dgl()
    return file.written - before[0], file.read - before[1]


@pytest.mark.parametrize("kind", [*KINDS, corner("mixed")])
@pytest.mark.parametrize("processes, size", [(1, 4), corner(1, 2), corner(2, 2)])
def test_planned_bytes_are_those_that_are_counted(
    tmp_path: Path, kind: str, processes: int, size: int
) -> None:
    json_file = divide(GRAPH, tmp_path, "random", processes * size).json_file
    plan = plan_turns(count_graph(json_file), processes, model_of(kind), 0)
    found = VirtualPool(processes, size).run(counted, str(json_file), kind)
    print(kind, plan, [sum(column) / processes for column in zip(*found, strict=True)], sum(f[0] for f in found)/plan.written/processes, sum(f[1] for f in found)/plan.read/processes)
    written, read = (sum(column) / processes for column in zip(*found, strict=True))
    assert plan.written == pytest.approx(written, rel=0.2)
    assert plan.read == pytest.approx(read, rel=0.2)
