"""What `sar plan --memory` predicts, against what the spill files count."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import sar
from sar.adapters.dgl.models import LayerStack
from sar.cli.demo import community_graph
from sar.errors import PartitionError
from sar.partition.in_memory import divide, training_graph
from sar.tensors.spillable import tensor_file
from sar.train.counted_graph import count_graph
from sar.train.plan_out_of_core import plan_out_of_core
from tests.partition.written import small_types
from tests.virtual.virtual_pool import VirtualPool

PARTS, WIDTHS = 4, (64, 96, 96, 5)


@pytest.fixture(autouse=True)
def patched_dgl() -> Iterator[None]:
    """As in a training script, and in the process of `sar plan`."""
    sar.patch_dgl()
    yield
    sar.unpatch_dgl()


def bytes_of_an_epoch(file: Path, kind: str) -> tuple[int, int]:
    """Written and read by this worker in the second of two epochs."""
    data, spill = sar.load_dgl_partition_data(file, sar.rank(), "cpu"), tensor_file.value.file
    x, labels, mask = (data.node_features[f"_N/{name}"] for name in ("feat", "label", "train_mask"))
    graph = sar.construct_full_graph(data)
    del data
    model = LayerStack(kind, WIDTHS, 2)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        before = spill.written, spill.read
        loss = functional.cross_entropy(model(graph, x)[mask.bool()], labels[mask.bool()], reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
    return spill.written - before[0], spill.read - before[1]


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_bytes_written_and_read(kind: str, tmp_path: Path) -> None:
    graph = training_graph(community_graph(4000, 32_000, num_features=WIDTHS[0], num_classes=WIDTHS[-1]))
    file = divide(graph, tmp_path / "parts", "small", PARTS).json_file
    plan = plan_out_of_core(count_graph(file), lambda info: LayerStack(kind, WIDTHS, 2), 1, 1)
    written, read = map(sum, zip(*VirtualPool(1, PARTS, fits=False).run(bytes_of_an_epoch, file, kind), strict=True))
    assert plan.written == pytest.approx(written, rel=0.25)
    assert plan.read == pytest.approx(read, rel=0.25)
    assert plan.mapped > graph.total_nodes * WIDTHS[0] * 4  # features, in a forward and a backward
    assert 0 < plan.partition < plan.stored


def test_counts_in_the_json_file_are_those_of_the_graphs(tmp_path: Path) -> None:
    file = divide(small_types(), tmp_path / "parts", "typed", 3).json_file
    stored, content = count_graph(file, in_width=2, num_classes=3), json.loads(file.read_text())
    del content["counts"]  # as in directories of DGL
    file.write_text(json.dumps(content))
    assert stored == count_graph(file, in_width=2, num_classes=3)
    content["counts"] = {"edges": [[[1]]], "rows": [[[1]]]}
    file.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match="the counts do not fit"):
        count_graph(file)
