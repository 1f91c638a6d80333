"""The example of averaged models: it learns, and partitions in turns give what they give side by side."""

import re
from pathlib import Path

import pytest

from sar.cli.demo import community_graph
from sar.partition.graph_data import write_npz
from tests.examples.test_full_graph import run


@pytest.mark.slow
def test_partitions_in_turns_give_the_same(tmp_path: Path) -> None:
    file, out = tmp_path / "generated.npz", tmp_path / "partitions"
    write_npz(community_graph(400, 4000, num_features=16, num_classes=4), file)
    run("examples/partition_graph.py", "--dataset", str(file), "--parts", "4", "--out", str(out))
    (tmp_path / "spill").mkdir()
    losses, accuracies = [], []
    for where in (["--workers", "2"], ["--workers", "1", "--resident", "1", "--spill", str(tmp_path / "spill")]):
        script = ["examples/model_averaging.py", "--partition-json", str(out / "generated.json"), "--epochs", "8"]
        said = run("-m", "sar", "launch", *where, *script)
        losses.append(list(map(float, re.findall(r"^epoch .*loss ([\d.]+)$", said, re.MULTILINE))))
        accuracies.append(float(re.findall(r"test ([\d.]+)", said)[-1]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert len(losses[0]) == 8
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert accuracies[0] == accuracies[1] > 0.4  # 0.25 by chance
