"""Pictures: epoch time, memory and bytes of each model on one graph, and growth with the number of edges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.report import MEGA
from benchmarks.results import Results
from benchmarks.summary import Row, Spread, single_rise, single_seconds, summarise

DGL, MODES, IDEAL = "#9db4c0", {1: "#d1495b", 2: "#edae49", 3: "#00798c"}, "#30323d"
WIDTH = 0.26


def draw_results(results: Results, file: Path) -> None:
    """One column for each model: seconds an epoch, memory of each worker, bytes sent."""
    models = results.models()
    figure = Figure(figsize=(4.2 * len(models), 8.4), dpi=80, layout="constrained")
    panels = figure.subplots(3, len(models), squeeze=False)
    for column, model in enumerate(models):
        rows = [summarise(results, model, *row) for row in results.rows(model)]
        time, memory, sent = panels[:, column]
        _draw_time(time, rows, single_seconds(results, model))
        _draw_memory(memory, rows, single_rise(results, model) / MEGA)
        _draw_bytes(sent, rows)
        time.set_title(model, fontsize=12)
    for axes, label in zip(panels[:, 0], ("seconds / epoch", "peak memory, MB", "MB sent / epoch"), strict=True):
        axes.set_ylabel(label)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    for axes in panels[:, 0]:
        axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    figure.suptitle(f"{results.graph}: {results.nodes:,} nodes, {results.edges:,} edges", fontsize=12)
    figure.savefig(file)


def _bars(axes: Axes, rows: Sequence[Row]) -> dict[int, list[tuple[float, Row]]]:
    """By mode, where each row goes: place 0 is DGL's, then comes a group for each W, its modes side by side."""
    workers, modes = (sorted({getattr(row, key) for row in rows}) for key in ("workers", "mode"))
    axes.set_xticks(range(len(workers) + 1), ["DGL", *(f"W = {count}" for count in workers)])
    axes.set_xlim(-0.6, len(workers) + 0.6)
    offset = {mode: WIDTH * (i - (len(modes) - 1) / 2) for i, mode in enumerate(modes)}
    return {
        mode: [(workers.index(row.workers) + 1 + offset[mode], row) for row in rows if row.mode == mode]
        for mode in modes
    }


def _draw_time(axes: Axes, rows: Sequence[Row], single: Spread) -> None:
    _bar(axes, [0], [single], DGL, "one process, DGL")
    for mode, bars in _bars(axes, rows).items():
        places, drawn = zip(*bars, strict=True)
        _bar(axes, places, [row.seconds for row in drawn], MODES[mode], f"sar, mode {mode}")


def _bar(axes: Axes, places: Sequence[float], spreads: Sequence[Spread], color: str, label: str) -> None:
    """Bars up to the medians, with whiskers from least to greatest."""
    medians, least, greatest = np.array(spreads).T
    whiskers = [medians - least, greatest - medians]
    axes.bar(places, medians, WIDTH * 0.9, yerr=whiskers, color=color, label=label, capsize=2)


def _draw_memory(axes: Axes, rows: Sequence[Row], single: float) -> None:
    """Every worker's peak, and the ideal."""
    axes.bar([0], [single], WIDTH * 0.9, color=DGL, label="one process, DGL")
    for mode, bars in _bars(axes, rows).items():
        places, peaks = zip(*((place, rise / MEGA) for place, row in bars for rise in row.rise), strict=True)
        axes.plot(places, peaks, ".", markersize=9, color=MODES[mode], label=f"each worker, mode {mode}")
    workers = sorted({row.workers for row in rows})
    ideal = [single, *(single / count for count in workers)]
    axes.plot(ideal, color=IDEAL, linestyle=(0, (3, 2)), marker="_", zorder=0, label="DGL's / W")


def _draw_bytes(axes: Axes, rows: Sequence[Row]) -> None:
    """What the busiest worker sends, and the least it has to."""
    for mode, bars in _bars(axes, rows).items():
        places, drawn = zip(*bars, strict=True)
        axes.bar(places, [row.sent / MEGA for row in drawn], WIDTH * 0.9, color=MODES[mode], label=f"mode {mode}")
        ends, needed = np.array(places), [row.needed / MEGA for row in drawn]
        label = "lower bound" if mode == rows[0].mode else ""
        axes.hlines(needed, ends - WIDTH * 0.45, ends + WIDTH * 0.45, color=IDEAL, linewidth=2, label=label)


def draw_growth(edges: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> None:
    """Values against millions of edges on logarithmic axes: a panel for each quantity, a line for each model."""
    figure = Figure(figsize=(4.6 * len(panels), 3.8), dpi=90, layout="constrained")
    millions = np.array(edges) / MEGA
    for axes, (quantity, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for color, (label, values) in zip(MODES.values(), lines.items(), strict=False):
            axes.loglog(millions, values, "o-", color=color, label=label)
        axes.set_xticks(millions, [f"{count:.3g}" for count in millions])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.margins(y=0.4)  # so that there are ticks around values that are all close
        axes.set_xlabel("million edges")
        axes.set_ylabel(quantity)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(file)


def draw_partitioning(bars: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Edge cut, seconds and memory of each partition method: a row of panels for each graph, a colour for each balance.

    Args:
        bars: with the keys graph, method, balance, edge_cut, seconds and megabytes.
        file: gets the picture.
    """
    graphs, methods, balances = (
        list(dict.fromkeys(bar[key] for bar in bars)) for key in ("graph", "method", "balance")
    )
    figure = Figure(figsize=(12, 0.4 + 2.6 * len(graphs)), dpi=80, layout="constrained")
    quantities = {"edge_cut": "share of edges cut", "seconds": "seconds", "megabytes": "peak memory, MB"}
    for row, graph in zip(figure.subplots(len(graphs), 3, squeeze=False), graphs, strict=True):
        for axes, (key, label) in zip(row, quantities.items(), strict=True):
            for i, balance in enumerate(balances):
                mine = [bar for bar in bars if (bar["graph"], bar["balance"]) == (graph, balance)]
                places = [methods.index(bar["method"]) + WIDTH * (i - (len(balances) - 1) / 2) for bar in mine]
                color = list(MODES.values())[i % len(MODES)]
                heights = [bar[key] for bar in mine]
                axes.bar(places, heights, WIDTH * 0.9, color=color, label=f"balanced: {balance}")
            axes.set_yscale("linear" if key == "edge_cut" else "log")
            axes.set_xticks(range(len(methods)), methods, rotation=45, ha="right")
            axes.set_ylabel(label)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.25)
            axes.set_axisbelow(True)
        row[0].set_title(graph, loc="left", fontsize=11)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(file)


def draw_averaging(graphs: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float]]]], file: Path) -> None:
    """Test accuracy by epoch: a panel for each graph, a line for each method.

    Args:
        graphs: by graph and method: epochs so far and accuracies, of equal lengths.
        file: gets the picture.
    """
    figure = Figure(figsize=(4.6 * len(graphs), 3.8), dpi=80, layout="constrained")
    panels = figure.subplots(1, len(graphs), squeeze=False)[0]
    for (graph, methods), axes in zip(graphs.items(), panels, strict=True):
        for color, (method, line) in zip([IDEAL, *MODES.values(), DGL], methods.items(), strict=False):
            axes.plot(*line, "--" if "batches" in method else "-", color=color, label=method, linewidth=1.5)
        best = max(max(accuracies) for _, accuracies in methods.values())
        axes.set_title(graph, fontsize=12)
        axes.set_xlabel("epochs")
        axes.set_xscale("log")
        axes.set_ylim(best - 0.4, best + 0.03)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy")
    panels[0].legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(file)


def draw_out_of_core(models: Mapping[str, Sequence[tuple[int, float, float]]], file: Path) -> None:
    """Memory, and time over that in memory, against the number of partitions of which one is in memory at a time.

    Args:
        models: partitions, MB and ratio of times, by model; 1 partition is the whole graph in memory.
        file: gets the picture.
    """
    figure = Figure(figsize=(9.2, 3.8), dpi=90, layout="constrained")
    memory, time = figure.subplots(1, 2)
    for color, (model, points) in zip((*MODES.values(), IDEAL)[: len(models)], models.items(), strict=True):
        parts, megabytes, ratios = zip(*sorted(points), strict=True)
        memory.loglog(parts, megabytes, "o-", color=color, label=model)
        memory.loglog(parts, [megabytes[0] / count for count in parts], ":", color=color, linewidth=1)
        time.semilogx(parts, ratios, "o-", color=color, label=model)
    memory.set_ylabel("MB in training (dotted: 1 / p)")
    memory.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    memory.yaxis.set_major_formatter("{x:g}")
    time.set_ylabel("time of an epoch / in memory")
    time.set_ylim(0, 1.15 * time.get_ylim()[1])
    for axes in (memory, time):
        axes.minorticks_off()
        axes.set_xticks(parts, ["in memory", *(str(count) for count in parts[1:])])
        axes.set_xlabel("partitions, one in memory at a time")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(file)
