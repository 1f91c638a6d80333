"""`sar demo`: partition a graph, train on it with several workers, and compare with one process of plain DGL."""

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sar.cli.demo.community_graph import community_graph
from sar.cli.demo.training import MODELS, Epoch, Job, train_distributed, train_single
from sar.errors import ConfigError
from sar.host.processes import run_workers
from sar.kernels import compile_ahead
from sar.partition.graph_data import GraphData, HeteroGraphData, write_npz
from sar.partition.in_memory import divide
from sar.partition.ingest.datasets import load_dataset
from sar.partition.inspect.text_tables import as_markdown, as_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `sar demo` takes."""
    parser.add_argument(
        "--dataset", help="an .npz file, or a name known to dgl.data or OGB; default: a generated graph"
    )
    parser.add_argument("--data", metavar="DIR", help="folder of .npz files (DATASET.npz) and of downloads")
    parser.add_argument("--parts", type=int, default=2, metavar="W", help="partitions and workers (%(default)s)")
    parser.add_argument("--epochs", type=int, default=40, metavar="N", help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Adam (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the graph, the split and the parameters (%(default)s)")
    parser.add_argument("--nodes", type=int, default=20_000, metavar="N", help="of the generated graph (%(default)s)")
    parser.add_argument(
        "--degree", type=int, default=20, metavar="D", help="mean, of the generated graph (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for demo.png and demo.md (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=600, metavar="S", help="for one training run (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print a table and save it as `demo.md`, with a picture `demo.png`; both replace those of an earlier run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the demo draws with matplotlib, which is not installed: pip install 'sar-gnn[plot]'")
    if importlib.util.find_spec("dgl") is None:
        raise ConfigError(
            "the demo trains layers of DGL, which is not installed: pip install 'dgl>=1.1.3,<2.2'. "
            "examples/pyg_gat.py trains layers of PyTorch Geometric."
        )
    if arguments.parts < 1 or arguments.epochs < 1:
        raise ConfigError(f"--parts {arguments.parts} --epochs {arguments.epochs}: expected at least 1 of each.")
    from sar.cli.demo import report  # needs matplotlib

    began = time.monotonic()
    compile_ahead()
    graph, name = _graph(arguments)
    with tempfile.TemporaryDirectory(prefix="sar-demo-") as folder:
        comparisons = _compare(arguments, graph, name, Path(folder))
    rows, bought = report.table(comparisons), report.what_workers_bought(comparisons)
    caption = f"{bought}\n\n{_caption(arguments.parts)}"
    print(f"\n{as_text(rows)}\n\n{caption}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "demo.md").write_text(f"{as_markdown(rows)}\n\n{caption}\n")
    title = f"{name}: {graph.num_nodes:,} nodes, {len(graph.src):,} edges\n{bought}"
    report.draw(comparisons, title, arguments.out / "demo.png")
    print(
        f"\nsaved {arguments.out / 'demo.png'} and {arguments.out / 'demo.md'} after {time.monotonic() - began:.0f} s"
    )
    return 0


def _graph(arguments: argparse.Namespace) -> tuple[GraphData, str]:
    """The graph to train on, in both directions and with self-loops, and its name."""
    if arguments.dataset is None:
        edges = arguments.nodes * arguments.degree // 2 * 2
        graph: GraphData | HeteroGraphData
        graph, name = community_graph(arguments.nodes, edges, seed=arguments.seed), "communities"
    else:
        graph, name = load_dataset(arguments.dataset, arguments.data), Path(arguments.dataset).stem
    if not isinstance(graph, GraphData):
        raise ConfigError(f"'{name}' is heterogeneous; the demo's models need one node type and one edge type.")
    if "feat" not in graph.node_data:
        raise ConfigError(f"'{name}' has no node features, which the demo's models need; choose a graph that has them.")
    return graph.with_split(arguments.seed).with_reverse_edges().with_self_loops(), name


def _compare(arguments: argparse.Namespace, graph: GraphData, name: str, folder: Path) -> list[Any]:
    """Partition the graph, and train each model with the workers and with one process."""
    from sar.cli.demo.report import Comparison

    num_classes = int(graph.node_data["label"].max()) + 1
    print(
        f"{name}: {graph.num_nodes:,} nodes, {len(graph.src):,} edges with self-loops, "
        f"{graph.node_data['feat'].shape[1]} features, {num_classes} classes"
    )
    parts = divide(graph, folder / "partitions", "graph", arguments.parts)
    sizes = " + ".join(f"{nodes:,}" for nodes in parts.nodes)
    print(f"METIS: {sizes} nodes; {parts.edge_cut:.1%} of the edges lead from one part to another")
    write_npz(graph, folder / "graph.npz")
    comparisons = []
    for model in MODELS:
        job = Job(model, num_classes, arguments.epochs, arguments.lr, arguments.seed)
        parameters = folder / f"{model}.pt"
        inputs = (parts.json_file, parameters)
        distributed = _train(arguments, train_distributed, job, *inputs, n_workers=arguments.parts, n_threads=1)
        inputs = (folder / "graph.npz", parameters)
        [(single, logits)] = _train(arguments, train_single, job, *inputs, n_workers=1, n_threads=arguments.parts)
        seen = np.sort(np.concatenate([run.original_ids for run in distributed]))
        assert np.array_equal(seen, np.arange(graph.num_nodes)), "every node has logits on exactly one worker"
        difference = max(float(np.abs(run.logits - logits[run.original_ids]).max()) for run in distributed)
        comparisons.append(Comparison(model, distributed, single, difference))
    return comparisons


def _train(arguments: argparse.Namespace, target: Any, job: Job, *inputs: Path, n_workers: int, n_threads: int) -> Any:
    """Run one training in processes of its own, under a progress bar where there is a terminal."""
    who = "1 process, DGL" if target is train_single else f"{n_workers} workers, sar"
    what, terminal = f"{job.model}, {who}".ljust(25), sys.stderr.isatty()
    said = ""
    with tqdm(total=job.epochs, desc=what, unit="epoch", dynamic_ncols=True, disable=not terminal) as bar:

        def show(epoch: Epoch) -> None:
            nonlocal said
            said = f"loss {epoch.loss:.4f}, validation {epoch.val_accuracy:.3f}"
            bar.set_postfix_str(said, refresh=False)
            bar.update()

        results = run_workers(
            target,
            job,
            *inputs,
            n_workers=n_workers,
            n_threads=n_threads,
            time_limit=arguments.time_limit,
            on_progress=show,
        )
    if not terminal:
        print(f"{what} {job.epochs} epochs, {said}", file=sys.stderr)
    return results


def _caption(n_workers: int) -> str:
    return (
        f"Workers: {n_workers} on this host, 1 thread each; the one process has {n_workers} threads. Same graph, "
        "seeds, initial parameters and epochs, no dropout; rounding alone makes the two drift apart while training.\n"
        "Features, which do not change, travel once (Config.cache_constant_inputs).\n"
        "Seconds are the median epoch of the slowest worker. MB sent and peak memory are the largest of any worker.\n"
        "Peak memory is the highest resident memory during training, minus that just before the first epoch, when "
        "graph, features, model and code are loaded.\n"
        "The logit difference is the largest over all nodes and classes, between the workers and the one process, both "
        "with the parameters that the workers trained."
    )
