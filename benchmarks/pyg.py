"""Epoch time and memory of PyTorch Geometric's layers, on one process and across workers: `python -m benchmarks.pyg`.

One process takes its edges as `edge_index`, or as a sparse CSR tensor if the layer supports it. With `--device cuda`
workers share a GPU, and the table goes into docs/gpus.md; "inf" means out of memory.
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks import command
from benchmarks.graphs import prepare
from benchmarks.measure import PYG, PYG_CSR
from benchmarks.report import MEGA, publish
from benchmarks.runs import Results, Way, run_all
from sar.errors import ConfigError
from sar.host.cuda import why_no_cuda

HEADER = "model", "trained by", "s / epoch", "time / PyG", "peak memory of a worker (MB)", "memory x W / PyG"
SINGLE = Way("PyG, edge_index", layers=PYG), Way("PyG, sparse CSR", layers=PYG_CSR)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark, and write the table."""
    parser = command.new_parser("benchmarks.pyg", __doc__)
    command.add_training(parser, workers=(1, 2, 4))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and (reason := why_no_cuda()) is not None:
        raise ConfigError(f"--device cuda: {reason}.")
    plan = command.plan_of(
        arguments, [*SINGLE, *(Way(f"sar, W = {count}", count, layers=PYG) for count in arguments.workers)]
    )
    plan = replace(plan, job=replace(plan.job, device=arguments.device))
    with command.work_directory(arguments.work) as work:
        graph = prepare("rmat", command.size_of(arguments), arguments.data, work, arguments.seed)
        rows = table(run_all(graph, plan))
    page, section = ("benchmarks.md", "pyg") if arguments.device == "cpu" else ("gpus.md", "measured")
    publish(arguments.docs / page, section, command.conditions_of(argv, arguments), rows)


def table(results: Results) -> list[tuple[str, ...]]:
    """Rows by model and way, after `HEADER`."""
    rows: list[tuple[str, ...]] = [HEADER]
    for model, way in results.runs:
        seconds = results.spread(model, way, lambda run: run.seconds).text(3)
        over = results.spread(model, way, lambda run: run.over_single).text()
        rise = f"{results.spread(model, way, lambda run: run.rise).median / MEGA:.0f}"
        share = results.spread(model, way, lambda run: run.rise * len(run.processes) / run.single[0].rise).text()
        rows.append((model, way.name, seconds, over, rise, share))
    return rows


if __name__ == "__main__":
    command.run_main(main)
