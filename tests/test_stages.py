"""What long work says of its stages: lines of the log, and of a command that has no terminal."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sar
from sar.cli import main
from sar.cli.demo import community_graph
from sar.partition.in_memory import divide
from sar.partition.ingest.masks import with_split
from tests.stages import stages_in


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_partitioning_tells_of_its_stages_where_there_is_no_terminal(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, on_a_terminal: bool
) -> None:
    np.save(tmp_path / "edges.npy", np.random.default_rng(0).integers(300, size=(2400, 2)))
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: on_a_terminal)
    level, handlers = sar.logger.level, list(sar.logger.handlers)
    options = ["--parts", "2", "--out", str(tmp_path / "parts"), "--method", "ldg"]
    assert main(["partition", str(tmp_path / "edges.npy"), *options]) == 0
    stages = stages_in(capsys.readouterr().err)
    if on_a_terminal:  # which has bars instead
        assert stages == []
    else:
        assert (stages[0], stages[-1]) == ("reading the input", "writing parts")
        assert "greedy passes" in stages
        assert len(set(stages)) == len(stages)
    assert (sar.logger.level, sar.logger.handlers) == (level, handlers)


def stages_of_a_worker(folder):
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    keep, level = Keep(), sar.logger.level
    sar.logger.addHandler(keep)
    sar.logger.setLevel("INFO")
    try:
        data = sar.load_dgl_partition_data(folder, sar.rank(), "cpu")
        graph = sar.construct_full_graph(data)
        seeds = torch.arange(*data.node_ranges[sar.rank()])
        sar.DataLoader(graph, seeds, sar.DistNeighborSampler([3]), batch_size=50, precompute_optimized_batches=True)
        return lines, graph.num_nodes(), graph.num_edges()
    finally:
        sar.logger.removeHandler(keep)
        sar.logger.setLevel(level)


@pytest.mark.parametrize("world_size", [2])
def test_loading_and_sampling_tell_of_their_stages(pool: int, tmp_path: Path) -> None:
    graph = with_split(community_graph(300, 2400, 6, 4))
    divide(graph, tmp_path, "small", 2)
    for rank, (lines, nodes, edges) in enumerate(pool.run(stages_of_a_worker, str(tmp_path))):
        stages = [line for line in lines if not line.startswith(("DGL", "compiling"))]
        assert stages[0].startswith(f"loading the share of worker {rank} of 2 in ")
        assert stages[1] == "making the graph of this worker's partition"
        assert stages[2].startswith(f"the graph is made: {nodes} nodes, {edges} edges into them, ")
        assert any(line.startswith("preparing sampling of [3]") for line in stages)
        assert any("that share neighbours into batches" in line for line in stages)
