"""`sar plan`: what training a model on a partition directory would take."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sar.adapters.dgl.models import KINDS
from sar.cli.graph_input import parse_bytes
from sar.cli.model_options import add_model, model_of, process_bytes, widths_of
from sar.train.footprint import plan_training, search_resident
from sar.train.graph_counts import GraphCounts, count_graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar plan` takes."""
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR_OR_JSON", help="a partition directory, or its JSON file")
    add_model(parser, default="sage")
    add("--workers", type=int, metavar="W", help="to plan for; default: one for each part, or with --resident one")
    memory = "such as 8GiB: how many workers, or with --resident partitions, fit?"
    add("--memory-per-worker", type=parse_bytes, metavar="SIZE", help=memory)
    add("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; the exit status is 1 where the directory is not sound."""
    make_model, process = model_of(arguments), process_bytes()
    print(f"sar plan: reading {arguments.directory}", file=sys.stderr)
    count = partial(count_graph, arguments.directory, in_width=arguments.features, num_classes=arguments.classes)
    counts = count(workers=1 if arguments.resident and arguments.workers is None else arguments.workers)
    described: dict[str, Any] = {"source": arguments.model}
    title = arguments.model
    if arguments.model in KINDS:
        widths = widths_of(counts.info, arguments)
        described = {"kind": arguments.model, "widths": widths, "heads": arguments.heads}
        title = f"{arguments.model}, widths {' -> '.join(map(str, widths))}"
    plan = plan_training(counts, make_model, process=process)
    memory, resident = arguments.memory_per_worker, None
    if not arguments.json:
        print(f"{title}, mode 1, freed memory given back\n\n{plan.as_text()}", flush=True)
        if memory is not None:
            print(f"\n{plan.advice(memory)}", flush=True)
    if arguments.resident:
        together = max(worker.memory.total for worker in plan.workers)

        def count_told(parts: int) -> GraphCounts:
            print(f"sar plan: trying {parts} partitions in turns", file=sys.stderr)
            return count(workers=parts)

        resident = search_resident(count_told, counts.num_workers, memory, together, make_model, process)
    if arguments.json:
        found = {"model": described} | plan.summary()
        if memory is not None:
            found |= {"memory_per_worker": memory, "fewest_workers": plan.fewest_workers(memory)}
        if resident is not None:
            found |= {"resident": resident.summary()}
        print(json.dumps(found))
    elif resident is not None:
        print(f"\n{resident.as_text()}")
    return 0
