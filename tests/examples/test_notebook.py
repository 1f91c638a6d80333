"""The notebook of examples/ runs from top to bottom, and shows the numbers and pictures that it speaks of."""

import re
from base64 import b64decode
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.workers import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "two_workers.ipynb"


@pytest.fixture
def notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_it_is_kept_with_the_outputs_of_one_run(notebook: NotebookNode) -> None:
    """Of `jupyter execute --inplace examples/two_workers.ipynb`, without paths of the machine."""
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert NOTEBOOK.stat().st_size < 100_000
    check_outputs(notebook)
    assert (
        re.findall(r"/(work|root|home|tmp|usr)/", "".join(output.get("text", "") for output in outputs(notebook))) == []
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client's
def test_it_trains_and_draws(notebook: NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    check_outputs(notebook)
    assert list(tmp_path.iterdir()) == []


def check_outputs(notebook: NotebookNode) -> None:
    said = "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")
    assert "40,000 nodes" in said
    assert "sound" in said
    results = re.findall(r"^(.+): loss ([\d.]+), test accuracy ([\d.]+)$", said, re.MULTILINE)
    assert [name for name, _, _ in results] == ["one worker", "two workers", "two workers that keep"]
    assert all(float(accuracy) > 0.9 for _, _, accuracy in results)
    [difference] = re.findall(r"largest difference between the losses: (\S+)", said)
    assert float(difference) < 1e-4
    lines = re.findall(r"^MB \w+ each epoch, .*: (.*)$", said, re.MULTILINE)
    received, memory = lines[:3], lines[3:]
    [alone], two, keeping = ([float(number) for number in line.split(", ")] for line in received)
    assert alone == 0 < max(keeping) < min(two)
    [alone], two, keeping = ([float(number) for number in line.split(", ")] for line in memory)
    assert max(two) < min(keeping) < max(keeping) < 0.8 * alone
    [figure] = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert b64decode(figure.data["image/png"]).startswith(b"\x89PNG")
