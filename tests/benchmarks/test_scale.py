"""The benchmark of graphs larger than memory: control groups, its tables, and the whole path on a tiny graph."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from benchmarks.control_group import Taken, control_group, run_limited
from benchmarks.scale_page import EPOCH, PAPERS, PICTURE, Size, measured, papers, whole
from sar.errors import ConfigError
from tests.benchmarks.test_benchmarks import benchmark

TAKES = "import sys; kept = b'x' * int(sys.argv[1]); open('file', 'wb').write(kept)"


def limited_or_skipped() -> None:
    try:
        with control_group(2**26):
            pass
    except ConfigError as refused:
        pytest.skip(str(refused))


def test_a_command_has_the_memory_of_its_group(tmp_path: Path) -> None:
    limited_or_skipped()
    runs = [
        run_limited([sys.executable, "-c", TAKES, str(size)], 2**26, tmp_path, tmp_path / "log", 60)
        for size in (2**24, 2**27)
    ]
    assert [run.status for run in runs] == [0, -signal.SIGKILL]
    assert runs[0].written >= 2**24 < runs[0].peak <= 2**26


def made_up(factor: int) -> Size:
    """A size whose seconds and bytes are in proportion to its edges."""

    def taken(*said: dict[str, Any], status: int = 0) -> Taken:
        return Taken(status, 10**9, 100.0 * factor, 1, 1, 0, 0, 0, 9 * 10**8, [(0.5, 5 * 10**8, 9 * 10**8)], list(said))

    epoch = {"seconds": 36.0 * factor, "forward": 12.0 * factor, "user": 3.0, "system": 1.0}
    epoch |= {"read": 10**9 * factor, "written": 10**9 * factor}
    train = taken({"loaded": 10.0 * factor}, epoch, epoch)
    steps = {"partition": taken({"replication_factor": 4.0}), "SAGE train": train, "SAGE infer": taken()}
    return Size(PAPERS[0] // 100 * factor, 10**6 * factor, 16, steps | {"SAGE whole": taken(status=-9)})


def test_tables_have_exponents_and_what_is_computed() -> None:
    sizes = [made_up(1), made_up(10)]
    exponents = {row[:2]: row[2:] for row in measured(sizes)}
    assert exponents["SAGE, DGL", EPOCH] == ("36.0 (12.0 + 24.0)", "360 (120 + 240)", "1.00")
    assert exponents["SAGE, DGL", "system / processor time"] == ("0.25", "0.25", "")
    assert [row[0] for row in measured(sizes)].count("GAT, DGL") == 0
    assert whole(sizes)[1] == ("SAGE, DGL", "1.00", "out of memory", "out of memory")
    header, cells = papers(sizes)
    computed = dict(zip(header, cells, strict=True))
    assert computed["load, h"] == "0.28 / 0.07"  # 10 s for a hundredth of the nodes
    # Three rows of others for each node, of which 3 / 4 are on other hosts, with 672 numbers of 4 bytes.
    assert computed["network, TB / epoch"] == "0 / 0.17"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_path(tmp_path: Path) -> None:
    limited_or_skipped()
    docs, readme = tmp_path / "docs", tmp_path / "README.md"
    readme.write_text("Above.\n<!-- generated: scale -->\n<!-- end: scale -->\nBelow.\n")
    sizes = "--edges", "20000", "--models", "SAGE", "--parts", "2", "--work", tmp_path / "work", "--docs", docs
    done = benchmark("benchmarks.scale", *sizes, timeout=350)
    assert done.returncode == 0, done.stderr
    page = (docs / "scale.md").read_text()
    assert "| SAGE, DGL | all outputs, s" in page
    assert imread(docs / PICTURE).std() > 0
    assert readme.read_text().startswith("Above.\n<!-- generated: scale -->\n0.001 million nodes with 128 features")
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["results.json"]
    again = benchmark("benchmarks.scale", *sizes, timeout=60)  # runs nothing
    assert again.returncode == 0
    assert (docs / "scale.md").read_text() == page
