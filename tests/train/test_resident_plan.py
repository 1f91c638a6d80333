"""What a plan says of partitions of which one is in memory, against what virtual workers write, read and hold."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import sar
from sar import spillable
from sar.adapters.dgl.models import LayerStack
from sar.cli import main
from sar.comm import allocator
from sar.partition.assign.assigning import AssigningOptions, assign
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.in_memory import divide
from sar.train import footprint
from sar.train.footprint import FIRST_EPOCH, ResidentPlan, plan_resident
from sar.train.graph_counts import GraphInfo, count_graph, count_source
from sar.train.parts_rule import PartsThatFit
from tests.matrix import corner
from tests.train.test_footprint import Mixed, patched_dgl, random_graph  # noqa: F401  a fixture
from tests.virtual.test_memory import anonymous
from tests.virtual.virtual_pool import VirtualPool, fill_the_heap

WIDTHS = (32, 64, 64, 16)
GRAPH = random_graph(3000, 30_000, WIDTHS[0])
NEAR = 0.3
"""To which a plan is right."""


def model_of(kind: str, widths: tuple[int, ...] = WIDTHS) -> Any:
    return Mixed if kind == "mixed" else lambda info: LayerStack(kind, widths, 4)  # type: ignore[arg-type]


class Peak:
    """The most anonymous memory that this process takes inside, above what it has before."""

    def __enter__(self) -> "Peak":
        self.most = 0
        self._before, self._ended = anonymous(), False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._ended = True
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended:
            self.most = max(self.most, anonymous() - self._before)
            time.sleep(0.002)


def counted(json_file: str, kind: str, widths: tuple[int, ...] = WIDTHS) -> tuple[int, int, int]:
    """Bytes written, read, and in memory at the peak, in the second epoch of a virtual worker."""
    spillable.LEAST_BYTES = 2**13  # as outside of tests
    allocator.set_allocator(spilled=True)
    filling = fill_the_heap()
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(json_file, sar.rank(), "cpu")
    x, labels, mask = (data.node_features[f"_N/{name}"] for name in ("feat", "label", "train_mask"))
    mask, graph = mask.bool(), sar.construct_full_graph(data)
    del data
    model = model_of(kind, widths)(GraphInfo(["_N"], graph.canonical_etypes, {}, {"_N": x.shape[1]}, widths[-1]))
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters())
    residency: Any = spillable.tensor_file.value
    file = residency.file
    before = 0, 0
    for _ in range(2):
        sar.all_sum(0)
        before = file.written, file.read
        with Peak() as peak:
            loss = functional.cross_entropy(model(graph, x)[mask], labels[mask], reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            sar.gather_grads(model)
            optimizer.step()
    sar.unpatch_dgl()
    del filling
    return file.written - before[0], file.read - before[1], peak.most


@pytest.mark.parametrize("kind", ["gat", *map(corner, ("sage", "gcn", "mixed"))])
@pytest.mark.parametrize("processes, size", [(1, 4), corner(1, 2), corner(2, 2)])
def test_planned_bytes_are_those_that_are_counted(tmp_path: Path, kind: str, processes: int, size: int) -> None:
    json_file = divide(GRAPH, tmp_path, "random", processes * size).json_file
    plan = plan_resident(count_graph(json_file), processes, model_of(kind), 0)
    found = VirtualPool(processes, size).run(counted, str(json_file), kind)
    written, read, _ = (sum(column) / processes for column in zip(*found, strict=True))
    assert plan.written == pytest.approx(written, rel=NEAR)
    assert plan.read == pytest.approx(read, rel=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_planned_memory_is_what_is_measured(tmp_path: Path, kind: str) -> None:
    widths = (64, 256, 256, 16)
    json_file = divide(random_graph(40_000, 300_000, widths[0]), tmp_path, "random", 4).json_file
    plan = plan_resident(count_graph(json_file), 1, model_of(kind, widths), 0)
    measured = max(peak for _, _, peak in VirtualPool(1, 4).run(counted, str(json_file), kind, widths))
    print(f"{kind}: {plan.partition / 1e6:.1f} MB planned, {measured / 1e6:.1f} measured")
    assert plan.partition == pytest.approx(measured, rel=NEAR)


SMALL = ["--hidden", "64", "--features", str(WIDTHS[0]), "--classes", str(WIDTHS[-1]), "--resident", "1"]


@pytest.fixture(autouse=True)
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sar.cli.plan.process_bytes", lambda: 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors count, as on large graphs."""
    monkeypatch.setattr(footprint, "WAITING", 0)


@pytest.mark.usefixtures("small")
def test_the_fewest_partitions_that_fit_are_the_fastest(tmp_path: Path, capsys: Any) -> None:
    directory = str(divide(GRAPH, tmp_path / "parts", "random", 2).json_file)

    def planned(*options: str) -> Any:
        assert main(["plan", directory, *SMALL, "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)["resident"]

    alone = planned()
    assert [plan["parts"] for plan in alone["plans"]] == [2, 4, 8]
    assert alone["fewest"] == 1
    assert planned("--memory-per-worker", f"{alone['together']}B")["fewest"] == 1
    limit = alone["plans"][0]["memory"]
    for memory, workers in ((limit, 1), (limit - 1, 2)):
        found = planned("--memory-per-worker", f"{memory}B", "--workers", str(workers))
        sizes = {plan["parts"]: plan["memory"] for plan in found["plans"]} | {workers: found["together"]}
        fewest = found["fewest"]
        assert sizes[fewest] <= memory
        assert fewest == workers or sizes[fewest - workers] > memory


def test_what_is_said_of_partitions_in_turns(tmp_path: Path, capsys: Any) -> None:
    directory = str(divide(GRAPH, tmp_path / "parts", "random", 2).json_file)
    for memory, said in (
        ("1GB", "all partitions fit 1,000.0 MB a process at once, which is faster"),
        (f"{FIRST_EPOCH + 4_500_000}B", "2 partitions are the fewest that fit 16.5 MB a process"),
        ("1MiB", "no number of partitions up to 4 fits 1 MiB (1.0 MB) a process"),
    ):
        assert main(["plan", directory, *SMALL, "--memory-per-worker", memory]) == 0
        found = capsys.readouterr()
        assert said in found.out
        told = [f"sar plan: reading {directory}", "sar plan: trying 2 partitions in turns"]
        assert found.err.splitlines()[:2] == told


@pytest.mark.usefixtures("small")
def test_parts_are_multiples_of_the_workers_that_take_them_in_turns(tmp_path: Path) -> None:
    graph = GraphSource(
        {"_N": GRAPH.num_nodes}, {("_N", "_E", "_N"): ArrayEdges(GRAPH.src, GRAPH.dst)}, {"_N": GRAPH.node_data}, {}
    )

    def divided(parts: Any) -> Any:
        return assign(AssigningOptions(parts, "random"), graph, tmp_path, None, lambda doing, share: None)

    def in_turns(parts: int) -> ResidentPlan:
        return plan_resident(count_source(graph, divided(parts).part_of, parts), 2, model_of("sage"), 0)

    def rule(memory: int) -> PartsThatFit:
        return PartsThatFit(2, memory, "a model", model_of("sage"), 0, resident=True)

    limit = in_turns(6).memory.total
    assigned = divided(rule(limit))
    assert assigned.num_parts == 6
    assert in_turns(4).memory.total > limit
    assert "6 parts, 3 in turns on each of 2 workers; on each, the file holds" in assigned.choice.why
    whole = divided(rule(10**9))
    assert whole.num_parts == 2
    assert "which is faster than in turns" in whole.choice.why
