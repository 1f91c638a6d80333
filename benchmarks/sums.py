"""Sums of rows over in-edges beside DGL's, in one process: `python -m benchmarks.sums`.

`update_all` with `copy_u` and with `u_mul_e` (one and four weights an edge), on one worker, with the allocator and the
huge pages of both equal. Writes the time over DGL's, as medians of calls in turn.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import sar
from benchmarks import command
from benchmarks.graphs import GeneratedSize, prepare
from benchmarks.report import describe_setting, write_section
from benchmarks.results import setting
from sar.adapters.dgl.models import dgl_graph
from sar.adapters.dgl.shim import require_dgl
from sar.partition.inspect.text_tables import as_markdown, as_text

SIZES = GeneratedSize(20_000, 400_000, 1), GeneratedSize(100_000, 2_000_000, 1)
WIDTHS = 16, 32, 64, 128, 256


def main(argv: Sequence[str]) -> None:
    """Print ratios and sar's milliseconds, and write the table of ratios to the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sums", description=__doc__)
    parser.add_argument("--docs", type=Path, default=command.DOCS, metavar="DIR", help="gets benchmarks.md")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="of each call (%(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="(1 2)")
    arguments = parser.parse_args(argv)
    sar.initialize_comms()
    rows = [("edges, threads", "call", *(f"width {width}" for width in WIDTHS))]
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare("rmat", size, Path(folder), Path(folder), 0)
            ours = sar.construct_full_graph(sar.load_dgl_partition_data(prepared.partitions(1), 0, "cpu"))
            data = prepared.data
        theirs = dgl_graph(*data.ends(), data.total_nodes).formats("csc")
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            bandwidth = _bandwidth()
            for weights in (0, 1, 4):
                times = [_compare(ours, theirs, width, weights, arguments.repeats) for width in WIDTHS]
                made = {f"`u_mul_e`, {weights}" if weights else "`copy_u`": [own for own, _ in times]}
                if not weights:  # all edges' rows read, and the results written
                    sizes = ((data.total_edges + data.total_nodes) * 4 * width for width in WIDTHS)
                    made["bytes / bandwidth"] = [size / bandwidth for size in sizes]
                for call, seconds in made.items():
                    cells = (f"{a / b:.2f}" for a, (_, b) in zip(seconds, times, strict=True))
                    rows.append((f"{data.total_edges:,}, {threads}", call, *cells))
                    print(as_text([rows[0], rows[-1]]))
                    print(f"milliseconds of sar: {', '.join(f'{1e3 * own:.1f}' for own in seconds)}", flush=True)
    words = "one process, so allocator and huge pages are the same for both"
    conditions = setting(command.shown("benchmarks.sums", argv), {"repeats": f"{arguments.repeats}, medians; {words}"})
    write_section(arguments.docs / "benchmarks.md", "sums", f"{describe_setting(conditions)}\n\n{as_markdown(rows)}")


def _bandwidth() -> float:
    """Bytes a second that torch's threads read from memory."""
    values, seconds = torch.ones(2**26), []
    for _ in range(5):
        start = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - start)
    return values.nbytes / min(seconds)


def _compare(ours: Any, theirs: Any, width: int, weights: int, repeats: int) -> tuple[float, float]:
    """Seconds of one call, ours and DGL's: medians."""
    fn = require_dgl().function
    x = torch.rand(theirs.num_nodes(), *((4, width // 4) if weights == 4 else (width,)))
    weight = torch.rand(theirs.num_edges(), *((4, 1) if weights == 4 else (1,)))
    message = fn.u_mul_e("x", "w", "m") if weights else fn.copy_u("x", "m")

    def call(graph: Any) -> Callable[[], None]:
        graph.ndata["x"], graph.edata["w"] = x, weight
        return lambda: graph.update_all(message, fn.sum("m", "out"))

    calls, seconds = (call(ours), call(theirs)), ([], [])  # type: tuple[Any, Any], tuple[list[float], list[float]]
    with torch.no_grad():
        for repeat in range(repeats + 3):
            for run, times in zip(calls, seconds, strict=True):
                start = time.perf_counter()
                run()
                if repeat >= 3:
                    times.append(time.perf_counter() - start)
    return median(seconds[0]), median(seconds[1])


if __name__ == "__main__":
    command.run_main(main)
