"""Pictures: bars, lines on logarithmic axes, and memory over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

COLORS = "#d1495b", "#edae49", "#00798c", "#30323d"


def draw_bars(columns: Mapping[str, Mapping[str, Mapping[str, float]]], file: Path) -> None:
    """Draw bars of values by title of a column, quantity of a row, and name of a bar."""
    quantities = list(next(iter(columns.values())))
    figure = Figure(figsize=(4.2 * len(columns), 2.8 * len(quantities)), dpi=80, layout="constrained")
    panels = figure.subplots(len(quantities), len(columns), squeeze=False)
    for number, (title, column) in enumerate(columns.items()):
        panels[0, number].set_title(title, fontsize=12)
        for axes, (quantity, values) in zip(panels[:, number], column.items(), strict=True):
            axes.bar(range(len(values)), list(values.values()), color=COLORS[2])
            axes.set_xticks(range(len(values)), list(values), rotation=45, ha="right", fontsize=8)
            axes.set_axisbelow(True)
            if number == 0:
                axes.set_ylabel(quantity)
            _plain(axes)
    _save(figure, file)


def draw_lines(
    x: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]], file: Path, xlabel: str
) -> None:
    """Draw values against `x`, both on logarithmic axes, by quantity of a panel and label of a line."""
    figure = Figure(figsize=(4.6 * len(panels), 3.8), dpi=90, layout="constrained")
    for axes, (quantity, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for color, (label, values) in zip(COLORS, lines.items(), strict=False):
            axes.loglog(x, values, "o-", color=color, label=label)
        axes.set_xticks(x, [f"{value:.3g}" for value in x])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.margins(y=0.4)  # shows ticks around nearly equal values
        axes.set_xlabel(xlabel)
        axes.set_ylabel(quantity)
        axes.legend(frameon=False, fontsize=9)
        _plain(axes)
    _save(figure, file)


def draw_timeline(steps: Mapping[str, Sequence[tuple[float, int, int]]], limit: int, file: Path) -> None:
    """Draw memory over time, without and with the page cache, of steps of (seconds, bytes, bytes)."""
    figure = Figure(figsize=(9.5, 3.8), dpi=90, layout="constrained")
    axes, begin = figure.subplots(), 0.0
    for number, (name, samples) in enumerate(steps.items()):
        minutes, least, most = np.array([(0, 0, 0), *samples]).T / np.array([[60], [1e9], [1e9]])
        words = ("with page cache", "without") if number == 0 else (None, None)
        axes.fill_between(begin + minutes, most, color=COLORS[2], alpha=0.25, linewidth=0, label=words[0])
        axes.fill_between(begin + minutes, least, color=COLORS[2], linewidth=0, label=words[1])
        axes.axvline(begin, color=COLORS[3], linewidth=0.6, alpha=0.5)
        place = begin + minutes[-1] / 2 if number else 0
        axes.text(place, limit / 1e9 * 1.05, name.replace(" ", "\n"), ha="center" if number else "left", fontsize=8)
        begin += minutes[-1]
    axes.axhline(limit / 1e9, color=COLORS[0], linestyle="--", label="limit")
    axes.set(xlim=(0, begin), ylim=(0, limit / 1e9 * 1.2), xlabel="minutes", ylabel="GB of memory")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _plain(axes)
    _save(figure, file)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
