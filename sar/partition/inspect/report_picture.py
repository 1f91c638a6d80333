"""A picture of who reads how much of whom."""

from os import PathLike

import numpy as np

from sar.errors import ConfigError
from sar.partition.inspect.directory_report import DirectoryReport

MOST_NUMBERS = 24
"""Parts up to which each cell shows its number."""


def draw_traffic(report: DirectoryReport, file: str | PathLike[str]) -> None:
    """Draw a heat map of the rows that each part sends to each other when every node's features travel once.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install 'sar-gnn[plot]'") from error
    rows, parts = np.array(report.traffic), len(report.parts)
    side = min(3.2 + 0.6 * parts, 11)
    figure = Figure(figsize=(side + 1.2, side), dpi=120, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.ma.masked_where(np.eye(parts, dtype=bool), rows), cmap="Blues", vmin=0)
    middle = rows.max() / 2
    for p, q in np.ndindex(parts, parts) if parts <= MOST_NUMBERS else ():
        if p != q:
            colour = "white" if rows[p, q] > middle else "#30323d"
            axes.text(q, p, _short(rows[p, q]), ha="center", va="center", fontsize=9, color=colour)
    ticks = np.arange(0, parts, max(1, parts // MOST_NUMBERS))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.set_xlabel("to part")
    axes.set_ylabel("from part")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(
        f"{report.name}: rows sent between parts\nedge cut {report.edge_cut:.1%}, "
        f"replication factor {report.replication_factor:.2f}",
        fontsize=11,
    )
    figure.colorbar(image, ax=axes, label="rows", shrink=0.8)
    figure.savefig(file)


def _short(count: int) -> str:
    """A number in at most five characters."""
    for limit, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if count >= limit:
            scaled = count / (1000 if unit == "k" else limit)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return str(count)
