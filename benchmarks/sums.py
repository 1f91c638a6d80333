"""Sums of rows over in-edges beside DGL's, in one process: `python -m benchmarks.sums`.

`update_all` with `copy_u` and with `u_mul_e` (one and four weights an edge), on one worker, with the allocator and the
huge pages of both equal. Writes the time over DGL's, as medians of calls in turn. With `--device cuda` it is the time
over a product with torch's sparse matrices, which are cuSPARSE, and goes into docs/gpus.md.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import sar
from benchmarks import command
from benchmarks.graphs import GeneratedSize, Graph, prepare
from benchmarks.report import publish, setting
from sar.adapters.dgl.shim import require_dgl
from sar.errors import ConfigError
from sar.host.cuda import why_no_cuda

SIZES = GeneratedSize(20_000, 400_000, 1), GeneratedSize(100_000, 2_000_000, 1)
WIDTHS = 16, 32, 64, 128, 256
WARM_UP = 3

Call = Callable[[], object]


def main(argv: Sequence[str]) -> None:
    """Print ratios and sar's milliseconds, and write the table of ratios to the page."""
    parser = command.new_parser("benchmarks.sums", __doc__, generates=False, repeats=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="(1 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and (reason := why_no_cuda()) is not None:
        raise ConfigError(f"--device cuda: {reason}.")
    words = "one process, so allocator and huge pages are the same for both"
    conditions = setting(command.shown("benchmarks.sums", argv), {"repeats": f"{arguments.repeats}, medians; {words}"})
    sar.initialize_comms()
    rows = [("edges, threads", "call", *(f"width {width}" for width in WIDTHS))]
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare("rmat", size, Path(folder), Path(folder), 0)
            data = sar.load_dgl_partition_data(prepared.partitions(1), 0, arguments.device)
        ours, theirs = sar.construct_full_graph(data), _baseline(prepared.graph, arguments.device)
        nodes, edges = len(prepared.graph.feat), len(prepared.graph.src)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            bandwidth = _bandwidth(arguments.device)
            for weights in (0, 1, 4):
                times = [_compare(ours, theirs, (nodes, edges), (width, weights), arguments) for width in WIDTHS]
                made = {f"`u_mul_e`, {weights}" if weights else "`copy_u`": [own for own, _ in times]}
                if not weights:  # all edges' rows read, and the results written
                    made["bytes / bandwidth"] = [(edges + nodes) * 4 * width / bandwidth for width in WIDTHS]
                for call, seconds in made.items():
                    cells = (f"{a / b:.2f}" for a, (_, b) in zip(seconds, times, strict=True))
                    rows.append((f"{edges:,}, {threads}", call, *cells))
                    print(*rows[-1], "milliseconds:", *(f"{1e3 * own:.1f}" for own in seconds), flush=True)
    page, section = ("benchmarks.md", "sums") if arguments.device == "cpu" else ("gpus.md", "sums on a GPU")
    publish(arguments.docs / page, section, conditions, rows)


def _baseline(graph: Graph, device: str) -> Callable[[Tensor, Tensor | None], Call]:
    """A function that makes the call to compare with, of features and of weights, if any."""
    fn = require_dgl().function
    if device == "cpu":
        theirs = graph.to_dgl().formats("csc")
        return lambda x, weight: _update_all(theirs, fn, x, weight)
    nodes = len(graph.feat)
    ends = torch.from_numpy(graph.dst).to(device), torch.from_numpy(graph.src).to(device)

    def product(x: Tensor, weight: Tensor | None) -> Call:  # one product for each of an edge's weights
        values = torch.ones(len(ends[0]), 1, device=device) if weight is None else weight.flatten(1)
        matrices = [
            torch.sparse_coo_tensor(torch.stack(ends), column, (nodes, nodes)).to_sparse_csr()
            for column in values.unbind(1)
        ]
        heads = x.view(nodes, len(matrices), -1).unbind(1)
        return lambda: [matrix @ head for matrix, head in zip(matrices, heads, strict=True)]

    return product


def _update_all(graph: Any, fn: Any, x: Tensor, weight: Tensor | None) -> Call:
    graph.ndata["x"] = x
    if weight is not None:
        graph.edata["w"] = weight
    message = fn.copy_u("x", "m") if weight is None else fn.u_mul_e("x", "w", "m")
    return lambda: graph.update_all(message, fn.sum("m", "out"))


def _compare(
    ours: Any, theirs: Any, size: tuple[int, int], shape: tuple[int, int], arguments: Any
) -> tuple[float, float]:
    """Seconds of one call, ours and the other: medians."""
    (nodes, edges), (width, weights), device = size, shape, arguments.device
    x = torch.rand(nodes, *((4, width // 4) if weights == 4 else (width,)), device=device)
    weight = torch.rand(edges, *((4, 1) if weights == 4 else (1,)), device=device) if weights else None
    calls = _update_all(ours, require_dgl().function, x, weight), theirs(x, weight)
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(arguments.repeats + WARM_UP):
            for run, times in zip(calls, seconds, strict=True):
                times.append(_seconds(run, device))
    return median(seconds[0][WARM_UP:]), median(seconds[1][WARM_UP:])


def _bandwidth(device: str) -> float:
    """Bytes a second that torch reads from memory."""
    values = torch.ones(2**26, device=device)
    return values.nbytes / min(_seconds(values.sum, device) for _ in range(5))


def _seconds(call: Call, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    command.run_main(main)
