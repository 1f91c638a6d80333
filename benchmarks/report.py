"""The generated parts of the pages: tables, and the settings under which they were measured.

They are also in docs/figures.json, from which tests take the figures that sentences, README and pictures repeat.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import SINGLE, Results, Run
from benchmarks.summary import Row, processor, single_rise, single_seconds, summarise
from sar.partition.inspect.text_tables import as_markdown

MEGA = 1e6
DETAILS = "/ floor", "cost / DGL", "/ needed", "s waited", "loss differs by"
"""Columns that are printed, but not written to the page."""
HEADER = (
    "model",
    "trained by",
    "mode",
    "s / epoch",
    "/ DGL",
    "/ floor",
    "cost / DGL",
    "MB at peak",
    "share",
    "MB sent",
    "/ needed",
    "s waited",
    "loss differs by",
)
CONSTRUCTION = ("graph", "workers", "load (s)", "construct (s)", "together", "peak (MB)", "graph (MB)", "kernels (s)")


def main_section(results: Results, picture: str) -> str:
    """The section of one graph."""
    columns = [number for number, name in enumerate(HEADER) if name not in DETAILS]
    parts = [
        f"{describe_graph(results)}\n\n{describe_setting(results.setting)}",
        as_markdown([[row[number] for number in columns] for row in table(results)]),
        f"![Epoch time, memory and bytes of each model on {results.graph}]({picture})",
    ]
    return "\n\n".join(parts)


def describe_graph(results: Results) -> str:
    """One line about the graph."""
    return (
        f"**{results.graph}**: {results.nodes:,} nodes, {results.edges:,} edges with self-loops, "
        f"{results.features:,} features, {results.classes} classes."
    )


def describe_setting(setting: Mapping[str, str]) -> str:
    """What the numbers depend on, in two lines: the command, and all else. Versions are on the page once."""
    shown = {key: value for key, value in setting.items() if key != "versions"}
    command, *others = (value if key in ("machine", "date") else f"{key}: {value}" for key, value in shown.items())
    return f"- {command}\n- {'; '.join(others)}"


def table(results: Results) -> list[tuple[str, ...]]:
    """Rows for every model, W and mode; `HEADER` first."""
    rows: list[tuple[str, ...]] = [HEADER]
    for model in results.models():
        alone = f"{single_rise(results, model) / MEGA:.0f}"
        blank = ("",) * (len(HEADER) - 8)
        rows.append((model, "1 process, DGL", "", single_seconds(results, model).text(), "1", "", "1", alone, *blank))
        rows += [_cells(summarise(results, model, *row)) for row in results.rows(model)]
    return rows


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        _who(row.workers),
        str(row.mode),
        row.seconds.text(),
        row.over_single.text(),
        row.over_floor.text(),
        row.cost.text(),
        f"{max(row.rise) / MEGA:.0f}",
        row.share.text(),
        f"{row.sent / MEGA:.1f}",
        f"{row.sent / row.needed:.3f}" if row.needed else "-",
        f"{row.waited:.2f}",
        f"{row.difference:.0e}",
    )


def _who(workers: int) -> str:
    return f"{workers} worker{'s' * (workers > 1)}, sar" if workers else "1 process, DGL"


def cost_table(results: Results) -> list[tuple[str, ...]]:
    """Processor seconds of an epoch by model and processes, and where they go; the header first."""
    rows, columns = [], list(dict.fromkeys(row for model in results.models() for row in results.rows(model)))
    for model in results.models():
        single = f"{median(map(processor, results.find(model, SINGLE))):.2f}"
        rows.append((model, single, *(_parts_of_cost(results.find(model, *column)) for column in columns)))
    modes = {mode for _, mode in columns}
    names = (_who(workers) + f", mode {mode}" * (len(modes) > 1) for workers, mode in columns)
    return [("model", _who(SINGLE), *names), *rows]


def _parts_of_cost(runs: Sequence[Run]) -> str:
    """As `0.84 + 0.22 + 0.30`: dense layers, aggregation, and the rest; empty where nothing ran."""
    if not runs:
        return ""
    dense, aggregation = (
        median(sum(getattr(process.traffic, part) for process in run.processes) for run in runs)
        for part in ("dense_processor", "aggregation_processor")
    )
    rest = median(map(processor, runs)) - dense - aggregation
    return f"{dense:.2f} + {aggregation:.2f} + {rest:.2f}"


def construction_table(results: Results) -> list[tuple[str, ...]]:
    """Time and memory of loading and constructing, by number of workers; `CONSTRUCTION` first."""
    rows: list[tuple[str, ...]] = [CONSTRUCTION]
    for workers in sorted({run.workers for run in results.runs if run.workers}):
        runs = [run for run in results.runs if run.workers == workers]
        load, construct, rise, size, kernels = (
            median(_most(run, field) for run in runs)
            for field in ("load", "construct", "construct_rise", "graph_bytes", "kernels")
        )
        times = f"{load:.2f}", f"{construct:.2f}", f"{load + construct:.2f}"
        sizes = f"{rise / MEGA:.1f}", f"{size / MEGA:.1f}"
        rows.append((results.graph, str(workers), *times, *sizes, f"{kernels:.2f}"))
    return rows


def _most(run: Run, field: str) -> float:
    return max(float(getattr(process.construction, field)) for process in run.processes)


def by_graph(rows: Iterable[Any], keys: Sequence[str], shown: str, cell: Callable[[Any], str]) -> list[tuple[str, ...]]:
    """A line for each combination of some fields of the rows, with a cell for each graph; names come first.

    `shown` says what is in a cell.
    """
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, key) for key in keys), {})[row.graph] = cell(row)
    graphs = list(dict.fromkeys(graph for cells in found.values() for graph in cells))
    lines = [(*key, *(cells.get(graph, "") for graph in graphs)) for key, cells in found.items()]
    return [(*keys, *(f"{graph}: {shown}" for graph in graphs)), *lines]


def write_section(page: Path, name: str, text: str) -> None:
    """Replace the generated part `name` of a page, or append it; all else stays as it is."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    content = page.read_text() if page.exists() else "# Benchmarks\n"
    before, found, rest = content.partition(begin)
    after = rest.partition(end)[2] if found else "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before if found else content.rstrip() + chr(10) * 2}{begin}\n\n{text}\n\n{end}{after}")
    figures = page.with_name("figures.json")
    sections = json.loads(figures.read_text()) if figures.exists() else {}
    sections[name] = {"page": page.name, **figures_of(text)}
    figures.write_text(json.dumps(dict(sorted(sections.items())), indent=1, ensure_ascii=False) + "\n")


def figures_of(text: str) -> dict[str, Any]:
    """The settings of a generated section, and the rows of its table by column."""
    lines = text.splitlines()  # with one table, if any
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]  # behind the rule
    return {"settings": [line.removeprefix("- ") for line in lines if line.startswith(("- ", "**"))], "rows": rows}
