"""Measured figures on the pages are those of docs/figures.json, which the benchmarks write with their tables."""

import json
import re

import pytest

from benchmarks.report import figures_of
from tests.workers import REPOSITORY

FIGURES = json.loads((REPOSITORY / "docs" / "figures.json").read_text())


def cells(section: str, column: str, **row: str) -> list[str]:
    """Cells of a column without spread, of the rows with these cells in other columns; `by` is "trained by"."""
    columns = {name.replace("by", "trained by"): cell for name, cell in row.items()}
    found = [one[column] for one in FIGURES[section]["rows"] if columns.items() <= one.items() and one[column]]
    return [re.sub(r" \([\d.-]+\)$", "", one) for one in found]


def readme_row(name: str, model: str) -> str:
    """Time of an epoch and peak memory of a worker, over those of DGL's process."""
    [whole], pairs = cells("rmat", "MB at peak", model=model, by="1 process, DGL"), []
    for workers in ("1 worker", "2 workers", "4 workers"):
        [time], [part] = (
            cells("rmat", column, model=model, by=f"{workers}, sar") for column in ("/ DGL", "MB at peak")
        )
        pairs.append(f"{time}, {int(part) / int(whole):.2f}")
    return f"| {name} | {' | '.join(pairs)} |"


def faq_row(graph: str) -> str:
    """Ratios of two workers on one graph."""
    found = re.search(r"([\d,]+) edges .* ([\d,]+) features", FIGURES[graph]["settings"][0])
    ratios = [" ".join(cells(graph, "/ DGL", model=model, by="2 workers, sar")) for model in ("SAGE", "GCN", "GAT")]
    return f"| {graph} | {found[1]} | {found[2]} | {' | '.join(ratios)} |".replace("|  |", "| |")  # type: ignore[index]


ROWS = [
    *(("README.md", readme_row(*names)) for names in (("GraphSAGE", "SAGE"), ("GAT", "GAT"))),
    *(("docs/choosing.md", faq_row(graph)) for graph in ("coauthor_cs", "soc_epinions", "rmat")),
]


@pytest.mark.parametrize(("page", "row"), ROWS)
def test_a_row_by_hand_repeats_the_figures(page: str, row: str) -> None:
    assert row in (REPOSITORY / page).read_text()


@pytest.mark.parametrize("name", FIGURES)
def test_a_generated_section_is_as_it_was_written(name: str) -> None:
    page = (REPOSITORY / "docs" / FIGURES[name]["page"]).read_text()
    [section] = re.findall(rf"<!-- generated: {name} -->\n(.*?)\n<!-- end: {name} -->", page, re.DOTALL)
    assert figures_of(section) == {key: FIGURES[name][key] for key in ("settings", "rows")}
    assert not FIGURES[name]["rows"] or any("command: `" in line for line in FIGURES[name]["settings"])
