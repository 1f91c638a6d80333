"""Accuracy in float32 and bfloat16 (autocast) on real graphs over several seeds: `python -m benchmarks.accuracy`.

A random 60 % of the nodes are for training, the others for testing. On a processor without instructions for
bfloat16, products are computed in float32 from the same operands, and rounded.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev

from benchmarks import command
from benchmarks.__main__ import dgl_way
from benchmarks.graphs import prepare
from benchmarks.report import publish, setting
from benchmarks.runs import in_bfloat16, run_all

GRAPHS = "cora", "amazon_computers"


def main(argv: Sequence[str]) -> None:
    """Train with each seed, and write the table."""
    parser = command.new_parser("benchmarks.accuracy", __doc__, repeats=5)
    command.add_training(parser, workers=(2,))
    parser.set_defaults(models=("SAGE", "GCN", "GAT"), epochs=40, warm_up=0)
    parser.add_argument("--graph", nargs="+", default=GRAPHS, metavar="NAME", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    exact = dgl_way(arguments.workers[0])
    plan = command.plan_of(arguments, [exact, in_bfloat16(exact)])
    plan = replace(plan, repeats=1, job=replace(plan.job, seeds=arguments.repeats))
    rows = [("graph", "model", "float32", "bfloat16")]
    with command.work_directory(arguments.work) as work:
        for name in arguments.graph:
            runs = run_all(prepare(name, command.size_of(arguments), arguments.data, work, 0), plan).runs
            for model in plan.models:
                of_ways = (runs[model, way][0].processes[0].accuracies for way in plan.ways)
                rows.append((name, model, *(f"{mean(each):.3f} ± {stdev(each):.3f}" for each in of_ways)))
    words = f"{arguments.repeats}, mean and standard deviation; {arguments.epochs} epochs of {exact.name}"
    conditions = setting(command.shown("benchmarks.accuracy", argv), {"seeds": words})
    publish(arguments.docs / "benchmarks.md", "bfloat16 accuracy", conditions, rows)


if __name__ == "__main__":
    command.run_main(main)
