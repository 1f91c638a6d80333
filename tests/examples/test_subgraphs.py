"""The example of subgraphs: it learns, with every sampler."""

import re
from pathlib import Path

import pytest

from sar.cli.demo import community_graph
from sar.partition.graph_data import write_npz
from tests.examples.test_full_graph import run

SAMPLERS = {"cluster": [], "edge": ["--budget", "80"], "node": ["--budget", "100"], "walk": ["--budget", "60", "2"]}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_it_learns(sampler: str, tmp_path: Path) -> None:
    file, out = tmp_path / "generated.npz", tmp_path / "partitions"
    write_npz(community_graph(400, 4000, num_features=16, num_classes=4), file)
    run("examples/partition_graph.py", "--dataset", str(file), "--parts", "2", "--out", str(out))
    options = ["--epochs", "6", "--batches", "5", "--sampler", sampler, *SAMPLERS[sampler]]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = run(*torchrun, "examples/subgraphs.py", "--partition-json", str(out / "generated.json"), *options)
    losses = list(map(float, re.findall(r"^epoch \d+: loss ([\d.]+)$", said, re.MULTILINE)))
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    [accuracy] = re.findall(r"^on the whole graph: .*test ([\d.]+)$", said, re.MULTILINE)
    assert float(accuracy) > 0.4  # 0.25 by chance
