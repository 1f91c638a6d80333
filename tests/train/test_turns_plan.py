"""What a plan says of partitions in turns, against what virtual workers write, read and hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import sar
from sar.adapters.dgl.models import LayerStack
from sar.cli import main, model_options
from sar.comm import allocator, session
from sar.outofcore import residency
from sar.outofcore.spill import DiskBandwidth, has_its_own_pages
from sar.partition.assign.assigning import AssigningOptions, assign
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.in_memory import divide
from sar.train import turns_plan
from sar.train.footprint import FIRST_EPOCH
from sar.train.graph_counts import GraphInfo, count_graph
from sar.train.parts_rule import FootprintRule
from sar.train.source_counts import count_source
from sar.train.turns_plan import TurnsPlan, plan_turns
from tests.matrix import corner
from tests.train.test_footprint import Mixed, patched_dgl, random_graph  # noqa: F401  a fixture
from tests.virtual.virtual_pool import VirtualPool

WIDTHS = (32, 64, 64, 16)
GRAPH = random_graph(3000, 30_000, WIDTHS[0])
DISK = DiskBandwidth(1e8, 2e8)


def model_of(kind: str) -> Any:
    return Mixed if kind == "mixed" else lambda info: LayerStack(kind, WIDTHS, 4)  # type: ignore[arg-type]


def fill_the_heap() -> list[torch.Tensor]:
    """Where this process has freed memory between small blocks, larger ones would go, and stay there."""
    filling = [torch.empty(allocator.SMALL, dtype=torch.uint8)]
    while not has_its_own_pages(filling[-1].data_ptr()):
        filling.append(torch.empty(allocator.SMALL, dtype=torch.uint8))
    return filling


def counted(json_file: str, kind: str) -> tuple[int, int]:
    """Bytes written, and read in the second epoch of a virtual worker."""
    residency.LEAST_BYTES = 2**13  # as outside of tests
    allocator.set_allocator(spilled=True)
    filling = fill_the_heap()
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(json_file, sar.rank(), "cpu")
    x, labels, mask = (data.node_features[f"_N/{name}"] for name in ("feat", "label", "train_mask"))
    mask, graph = mask.bool(), sar.construct_full_graph(data)
    del data
    model = model_of(kind)(GraphInfo(["_N"], graph.canonical_etypes, {}, {"_N": x.shape[1]}, WIDTHS[-1]))
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters())
    group: Any = session.current_group()
    file = group._transport._residency.file
    before = 0, 0
    for _ in range(2):
        before = file.written, file.read
        loss = functional.cross_entropy(model(graph, x)[mask], labels[mask], reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
    sar.unpatch_dgl()
    del filling
    return file.written - before[0], file.read - before[1]


@pytest.mark.parametrize("kind", ["gat", *map(corner, ("sage", "gcn", "mixed"))])
@pytest.mark.parametrize("processes, size", [(1, 4), corner(1, 2), corner(2, 2)])
def test_planned_bytes_are_those_that_are_counted(tmp_path: Path, kind: str, processes: int, size: int) -> None:
    json_file = divide(GRAPH, tmp_path, "random", processes * size).json_file
    plan = plan_turns(count_graph(json_file), processes, model_of(kind), 0)
    found = VirtualPool(processes, size).run(counted, str(json_file), kind)
    written, read = (sum(column) / processes for column in zip(*found, strict=True))
    # What the allocator has put between small blocks stays. Of several, the plan is that of the process with most data.
    near = 0.05 if processes == 1 else 0.15
    assert plan.written == pytest.approx(written, rel=near)
    assert plan.read == pytest.approx(read, rel=near)


SMALL = ["--hidden", "64", "--features", str(WIDTHS[0]), "--classes", str(WIDTHS[-1]), "--resident", "1", "--spill"]


@pytest.fixture
def known_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_options, "disk_bandwidth", lambda folder: DISK)
    monkeypatch.setattr("sar.cli.plan.process_bytes", lambda: 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors count, as on large graphs."""
    monkeypatch.setattr(turns_plan, "WAITING", 0)


@pytest.mark.usefixtures("known_disk", "small")
def test_the_fewest_partitions_that_fit_are_the_fastest(tmp_path: Path, capsys: Any) -> None:
    directory = str(divide(GRAPH, tmp_path / "parts", "random", 2).json_file)

    def planned(*options: str) -> Any:
        assert main(["plan", directory, *SMALL, str(tmp_path), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)["turns"]

    alone = planned()
    assert [plan["parts"] for plan in alone["in_turns"]] == [2, 4, 8]
    assert alone["fastest"] == 1
    assert planned("--memory", str(alone["together"]))["fastest"] == 1
    limit = alone["in_turns"][0]["memory"]
    for memory, workers in ((limit, 1), (limit - 1, 2)):
        found = planned("--memory-per-worker", str(memory), "--workers", str(workers))
        sizes = {plan["parts"]: plan["memory"] for plan in found["in_turns"]} | {workers: found["together"]}
        fastest = found["fastest"]
        assert sizes[fastest] <= memory
        assert fastest == workers or sizes[fastest - workers] > memory
    plan = alone["in_turns"][1]
    written, read = plan["written"] + plan["written_in_place"], plan["read"] + plan["read_in_place"]
    assert plan["disk_seconds"] == pytest.approx(written / DISK.write + read / DISK.read)


@pytest.mark.usefixtures("known_disk")
def test_what_is_said_of_partitions_in_turns(tmp_path: Path, capsys: Any) -> None:
    directory = str(divide(GRAPH, tmp_path / "parts", "random", 2).json_file)
    for memory, said in (
        ("1GB", "all partitions fit 1,000.0 MB a process at once, which is faster"),
        (str(FIRST_EPOCH + 4_500_000), "2 partitions are the fewest that fit 16.5 MB a process"),
        ("1MB", "no number of partitions up to 4 fits 1.0 MB a process"),
    ):
        assert main(["plan", directory, *SMALL, str(tmp_path), "--memory", memory]) == 0
        assert said in capsys.readouterr().out
    assert main(["plan", directory, "--resident", "1"]) == 1
    assert "--resident and --spill go together" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_parts_are_multiples_of_the_workers_that_take_them_in_turns(tmp_path: Path) -> None:
    graph = GraphSource(
        {"_N": GRAPH.num_nodes}, {("_N", "_E", "_N"): ArrayEdges(GRAPH.src, GRAPH.dst)}, {"_N": GRAPH.node_data}, {}
    )

    def divided(parts: Any) -> Any:
        return assign(AssigningOptions(parts, "random"), graph, tmp_path, None, lambda doing, share: None)

    def in_turns(parts: int) -> TurnsPlan:
        return plan_turns(count_source(graph, divided(parts).part_of, parts), 2, model_of("sage"), 0)

    def rule(memory: int) -> FootprintRule:
        return FootprintRule(2, memory, "a model", model_of("sage"), 0, disk=DISK)

    limit = in_turns(6).memory
    assigned = divided(rule(limit))
    assert assigned.num_parts == 6
    assert in_turns(4).memory > limit
    assert "6 parts, 3 in turns on each of 2 workers: an epoch writes up to" in assigned.choice.why
    assert "at 100.0 MB/s written and 200.0 MB/s read that is 0." in assigned.choice.why
    whole = divided(rule(10**9))
    assert whole.num_parts == 2
    assert "which is faster than in turns" in whole.choice.why
