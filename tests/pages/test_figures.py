"""Measured figures on the pages are those of docs/figures.json, which the benchmarks write with their tables."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.report import figures_of
from tests.pages.blocks import PAGES
from tests.workers import REPOSITORY

FIGURES = json.loads((REPOSITORY / "docs" / "figures.json").read_text())


def text(page: str) -> str:
    """A page's text, each run of blanks as one."""
    return " ".join((REPOSITORY / ("" if page == "README.md" else "docs") / page).read_text().split())


def cells(section: str, column: str, **row: str) -> list[str]:
    """Cells of a column without spread, of the rows with these cells in other columns; `by` is "trained by"."""
    columns = {name.replace("by", "trained by"): cell for name, cell in row.items()}
    found = [one[column] for one in FIGURES[section]["rows"] if columns.items() <= one.items() and one[column]]
    return [re.sub(r" \([\d.-]+\)$", "", one) for one in found]


def cell(section: str, column: str, **row: str) -> str:
    """The only one of `cells`."""
    [only] = cells(section, column, **row)
    return only


def span(values: Iterable[str]) -> str:
    """`LOW to HIGH`."""
    ordered = sorted(values, key=float)
    return f"{ordered[0]} to {ordered[-1]}"


def over_dgl(model: str, workers: str) -> str:
    """Time of an epoch over DGL's."""
    return cell("rmat", "/ DGL", model=model, by=f"{workers}, sar")


def memory(model: str, workers: str) -> str:
    """Peak memory of a worker over that of DGL's process."""
    whole, part = (cell("rmat", "MB at peak", model=model, by=by) for by in ("1 process, DGL", f"{workers}, sar"))
    return f"{int(part) / int(whole):.2f}"


def readme_row(name: str, model: str) -> str:
    pairs = (f"{over_dgl(model, w)}, {memory(model, w)}" for w in ("1 worker", "2 workers", "4 workers"))
    return f"| {name} | {' | '.join(pairs)} |"


def faq_row(graph: str) -> str:
    """Ratios of two workers on one graph."""
    found = re.search(r"([\d,]+) edges .* ([\d,]+) features", FIGURES[graph]["settings"][0])
    ratios = [" ".join(cells(graph, "/ DGL", model=model, by="2 workers, sar")) for model in ("SAGE", "GCN", "GAT")]
    return f"| {graph} | {found[1]} | {found[2]} | {' | '.join(ratios)} |".replace("|  |", "| |")  # type: ignore[index]


def cuts(method: str) -> list[str]:
    """Edge cuts of a method on the block model, in per cent."""
    return [one.split(", ")[2].removesuffix(" %") for one in cells("partitioning", "sbm: s, MB, cut", method=method)]


PYG = [row for row in FIGURES["pyg"]["rows"] if row["trained by"].startswith("sar")]
OVER_CSR = [
    f"{float(row['s / epoch']) / float(cell('pyg', 's / epoch', model=row['model'], by='PyG, sparse CSR')):.2f}"
    for row in PYG
    if cells("pyg", "s / epoch", model=row["model"], by="PyG, sparse CSR")
]
OVER_PYG, MEMORY_OVER_PYG = (span(row[name] for row in PYG) for name in ("time / PyG", "memory x W / PyG"))
SHARES = span(memory(model, "4 workers") for model in ("SAGE", "GCN", "GAT"))
BATCHES = cell("minibatch", "/ DistDGL", **{"batches from": "sar"})
SAGE, GCN, GAT = (over_dgl(model, "2 workers") for model in ("SAGE", "GCN", "GAT"))
SAGE_OVER_BOUND = max(abs(100 * float(one) - 100) for one in cells("network", "/ bound", model="SAGE"))

SENTENCES = [
    ("README.md", f"Each of four workers needs {SHARES} of the memory of DGL's one process"),
    *(("README.md", readme_row(*names)) for names in (("GraphSAGE", "SAGE"), ("GCN", "GCN"), ("GAT", "GAT"))),
    *(("choosing.md", faq_row(graph)) for graph in ("coauthor_cs", "soc_epinions", "rmat")),
    ("choosing.md", f"eight workers of SAGE take {over_dgl('SAGE', '8 workers')} times as long as DGL"),
    (
        "choosing.md",
        f"two workers take {GAT} of DGL's time for GAT, and {span([SAGE, GCN])} for GraphSAGE and GCN",
    ),
    ("choosing.md", f"without servers, in {BATCHES} of its time"),
    ("howto/from-dgl.md", f"This loader takes [{BATCHES} of DistDGL's time]"),
    ("choosing.md", f"it cuts {span(cuts('multilevel'))} %, random partitions {cuts('random')[0]} %"),
    ("pyg.md", f"layers take {OVER_PYG} of the time and {MEMORY_OVER_PYG} of the memory of `edge_index`"),
    (
        "benchmarks.md",
        f"One or two workers take {OVER_PYG} of its time with `edge_index`, {span(OVER_CSR)} with its",
    ),
    (
        "benchmarks.md",
        f"GAT takes {over_dgl('GAT', '1 worker')} to {GAT} of DGL's time with one or two workers",
    ),
    ("benchmarks.md", f"With 1 Gbit/s SAGE is within {SAGE_OVER_BOUND:.0f} % of the network bound"),
    ("benchmarks.md", f"GAT takes {span(cells('network', '/ bound', model='GAT'))} times as long"),
    ("benchmarks.md", f"| They take {BATCHES} of DistDGL's time, without servers. |"),
    (
        "choosing.md",
        f"Two workers take {SAGE} (SAGE), {GCN} (GCN) and {GAT} (GAT) of DGL's time",
    ),
]
SETTINGS = (
    "(probabilities 0.57, 0.19, 0.19, 0.05)",
    "--imbalance` (0.05)",
    "their norm is 1.04 instead of 0.52 with two workers, 2.09 instead of 0.51 with four",
    "leaves a norm of 0.17 with two workers, 0.24 with four",
)
"""Numbers of the same form that are settings, and norms on the graph of an example."""
[DEMO] = re.findall(r"2 workers beside 1 process: .*?\(equal share: 0\.50\)\.", text("README.md"))


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_a_sentence_repeats_the_figures(page: str, sentence: str) -> None:
    assert " ".join(sentence.split()) in text(page)


@pytest.mark.parametrize("name", FIGURES)
def test_a_generated_section_is_as_it_was_written(name: str) -> None:
    page = (REPOSITORY / "docs" / FIGURES[name]["page"]).read_text()
    [section] = re.findall(rf"<!-- generated: {name} -->\n(.*?)\n<!-- end: {name} -->", page, re.DOTALL)
    assert figures_of(section) == {key: FIGURES[name][key] for key in ("settings", "rows")}
    assert not FIGURES[name]["rows"] or any("command: `" in line for line in FIGURES[name]["settings"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_other_ratio_stands_in_a_sentence(page: Path) -> None:
    """Ratios are measured, so those in prose and in tables that nobody generated are among `SENTENCES`."""
    prose = re.sub(r"<!-- generated.*?<!-- end: [^>]*>|```.*?```", "", page.read_text(), flags=re.DOTALL)
    prose = " ".join(prose.split())
    for sentence in (*(sentence for _, sentence in SENTENCES), *SETTINGS, DEMO):
        prose = prose.replace(" ".join(sentence.split()), "")
    assert re.findall(r".{40}(?<![\w.@=-])[01]\.\d\d(?![\d.-]).{20}", prose) == []


def test_the_demo_ends_alike_on_both_pages() -> None:
    assert DEMO in text("install.md")
