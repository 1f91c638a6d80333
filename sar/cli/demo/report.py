"""The demo's table and picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sar.cli.demo.training import Run

DISTRIBUTED, SINGLE, IDEAL = "#d1495b", "#9db4c0", "#30323d"
MEGA = 1e6


@dataclass(frozen=True)
class Comparison:
    """One model trained twice: by the workers together, `distributed` one each, and by one process.

    `difference`: largest absolute difference between their logits at the same parameters.
    """

    model: str
    distributed: list[Run]
    single: Run
    difference: float

    @property
    def seconds(self) -> tuple[float, float]:
        """Median epochs, of the slowest worker and of the one process."""
        return max(float(np.median(run.seconds)) for run in self.distributed), float(np.median(self.single.seconds))

    @property
    def peak_rises(self) -> tuple[int, int]:
        """Peak memory in bytes, of the largest worker and of the one process."""
        return max(run.peak_rise for run in self.distributed), self.single.peak_rise


HEADER = (
    "model",
    "trained by",
    "test accuracy",
    "s / epoch",
    "MB sent / epoch",
    "peak memory (MB)",
    "largest logit difference",
)


def table(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """The rows of the table, `HEADER` first; of several workers, the largest number."""
    rows: list[tuple[str, ...]] = [HEADER]
    for comparison in comparisons:
        workers = comparison.distributed
        both = (f"{len(workers)} workers, sar", workers), ("1 process, DGL", [comparison.single])
        for (who, runs), seconds, peak_rise in zip(both, comparison.seconds, comparison.peak_rises, strict=True):
            sent = max(run.bytes_sent for run in runs)
            rows.append(
                (
                    comparison.model,
                    who,
                    f"{runs[0].test_accuracy:.4f}",
                    f"{seconds:.3f}",
                    f"{sent / MEGA:.1f}" if runs is workers else "-",
                    f"{peak_rise / MEGA:.0f}",
                    f"{comparison.difference:.1e}" if runs is workers else "",
                )
            )
    return rows


def what_workers_bought(comparisons: Sequence[Comparison]) -> str:
    """Speed and memory of the workers against the one process, in one line."""
    gains = []
    for comparison in comparisons:
        (seconds, single_seconds), (rise, single_rise) = comparison.seconds, comparison.peak_rises
        speed, share = single_seconds / seconds, rise / max(single_rise, 1)
        gains.append(f"{comparison.model} {speed:.1f} x as fast at {share:.0%} of the memory each")
    workers = len(comparisons[0].distributed)
    return f"{workers} workers against 1 process: {', '.join(gains)} (even: {1 / workers:.0%})."


def draw(comparisons: Sequence[Comparison], title: str, file: Path) -> None:
    """Save one picture: the loss curves of each model, and the memory of each process."""
    figure = Figure(figsize=(4 * (len(comparisons) + 1), 3.6), dpi=120, layout="constrained")
    *curves, bars = figure.subplots(1, len(comparisons) + 1)
    for axes, comparison in zip(curves, comparisons, strict=True):
        _draw_losses(axes, comparison)
    curves[0].set_ylabel("training loss")
    _draw_memory(bars, comparisons)
    for axes in (*curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file)


def _draw_losses(axes: Axes, comparison: Comparison) -> None:
    single, distributed = comparison.single.losses, comparison.distributed[0].losses
    axes.plot(single, color=SINGLE, linewidth=6, solid_capstyle="round", label="1 process, DGL")
    label = f"{len(comparison.distributed)} workers, sar"
    axes.plot(distributed, color=DISTRIBUTED, linewidth=1.6, linestyle=(0, (4, 2)), label=label)
    axes.set_title(comparison.model, fontsize=11)
    axes.set_xlabel("epoch")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)
    gap = max(abs(a - b) for a, b in zip(single, distributed, strict=True))
    axes.annotate(
        f"at most {gap:.0e} apart", (0.97, 0.62), xycoords="axes fraction", ha="right", fontsize=9, color=IDEAL
    )


def _draw_memory(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    width = 0.8
    position = 0.0
    centres: list[float] = []
    for comparison in comparisons:
        start = position
        peaks = [comparison.single.peak_rise, *(run.peak_rise for run in comparison.distributed)]
        for index, peak in enumerate(peaks):
            axes.bar(position, peak / MEGA, width, color=DISTRIBUTED if index else SINGLE)
            axes.text(position, 0.02 * max(peaks) / MEGA, f"{peak / MEGA:.0f}", ha="center", va="bottom", color="white")
            position += 1
        ideal = comparison.single.peak_rise / len(comparison.distributed) / MEGA
        label = "" if centres else f"ideal, 1/{len(comparison.distributed)} of one process"
        axes.hlines(ideal, start + 0.5, position - 0.5, color=IDEAL, linewidth=1.4, linestyle=(0, (2, 2)), label=label)
        centres.append((start + position - 1) / 2)
        position += 0.6
    axes.set_xticks(centres, [comparison.model for comparison in comparisons])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("MB")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.18)
    axes.set_title("peak training memory per process", fontsize=11)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
