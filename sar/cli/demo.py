"""`sar demo`: train on one graph in memory, by several workers and out of core, and write the outputs of all nodes."""

import argparse
import importlib.util
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import sar
from sar.adapters.dgl.models import GAT, GraphSAGE, dgl_graph
from sar.adapters.dgl.shim import has_dgl
from sar.comm.allocator import set_allocator
from sar.common_tuples import SPLIT, PartitionData, ShardEdgesAndFeatures
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.host.cuda import peak_memory, why_no_cuda
from sar.host.memory import PeakAnonymous
from sar.host.processes import run_workers
from sar.outofcore.workers import run_in_turns
from sar.partition.graph_source import ONLY_TYPE, GraphSource
from sar.partition.in_memory import divide, training_graph
from sar.partition.ingest.datasets import load_dataset
from sar.partition.inspect.text_tables import as_markdown, as_text
from sar.train.inference import infer

MODELS: dict[str, type[nn.Module]] = {"GraphSAGE": GraphSAGE, "GAT": GAT}
HEADER = "model, trained by, test accuracy, s / epoch, MB sent / epoch, peak memory (MB), largest logit difference"
PLAIN = "DGL" if has_dgl() else "sar"
MEGA = 1e6


class Run(NamedTuple):
    """The results of one process."""

    losses: list[float]  # of each epoch
    validation: float  # accuracy in the last epoch, 0 to 1
    compiling: float  # seconds before the epochs, to compile kernels, or load them from disk
    seconds: float  # of the median epoch
    test_accuracy: float
    peak_memory: int  # bytes above the level before training
    bytes_sent: float  # in an epoch, on average
    ids: Any  # nodes, (N_i,)
    logits: Any  # of these nodes, (N_i, C)


def run(arguments: argparse.Namespace) -> int:
    """Print a table and save it as `demo.md`, with a picture `demo.png`; both replace those of an earlier run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the demo draws with matplotlib, which is not installed: pip install matplotlib")
    for option in ("parts", "workers", "epochs"):
        if getattr(arguments, option) < 1:
            raise ConfigError(f"--{option} {getattr(arguments, option)}: expected at least 1.")
    if arguments.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {arguments.device}: expected cpu or cuda.")
    if arguments.device == "cuda" and (reason := why_no_cuda()) is not None:
        raise ConfigError(f"--device cuda: {reason}.")
    began = time.monotonic()
    graph, name = _graph(arguments)
    size = f"{name}: {graph.total_nodes:,} nodes, {graph.total_edges:,} edges"
    (fields,) = graph.node_data.values()
    features, classes = fields["feat"].shape[1], fields["label"][:].max() + 1
    print(f"{size} with self-loops, {features} features, {classes} classes")
    with tempfile.TemporaryDirectory(prefix="sar-demo-") as folder:
        runs = _train_all(arguments, graph, Path(folder))
    rows, ratios = _table(runs, who := _who(arguments))
    caption = f"{ratios}\n\n{CAPTION.format(workers=arguments.workers, parts=arguments.parts)}"
    caption += f"\n{IN_BFLOAT16}" if arguments.bf16 else ""
    caption += "" if arguments.device == "cpu" else f"\n{ON_DEVICE.format(device=arguments.device)}"
    print(f"\n{as_text(rows)}\n\n{caption}")
    table, picture = arguments.out / "demo.md", arguments.out / "demo.png"
    arguments.out.mkdir(parents=True, exist_ok=True)
    table.write_text(f"{as_markdown(rows)}\n\n{caption}\n")
    _draw(runs, who, size, picture)
    outputs = [str(arguments.out / f"{name}.npy") for name in MODELS if arguments.device == "cpu"]
    print(f"\nsaved {', '.join([*outputs, str(table), str(picture)])} after {time.monotonic() - began:.0f} s")
    return 0


def _graph(arguments: argparse.Namespace) -> tuple[GraphSource, str]:
    """The graph to train on, in both directions and with self-loops, and its name."""
    if arguments.dataset is None:
        edges = arguments.nodes * arguments.degree // 2 * 2
        graph, name = community_graph(arguments.nodes, edges, seed=arguments.seed), "communities"
    else:
        graph, name = load_dataset(arguments.dataset, arguments.data), arguments.dataset
    (fields,) = graph.node_data.values()
    for field, what in (("feat", "node features"), ("label", "labels of nodes")):
        if field not in fields:
            raise ConfigError(f"'{name}' has no {what}, which the demo's models need; choose a graph that has them.")
    return training_graph(graph, arguments.seed), name


# -- training


def _train_all(arguments: argparse.Namespace, graph: GraphSource, folder: Path) -> dict[str, list[list[Run]]]:
    """Train each model by one process, by the workers, and, on a CPU, out of core."""
    parts = divide(graph, folder / "partitions", "graph", arguments.parts)
    print(f"{arguments.parts} partitions, METIS; {parts.edge_cut:.1%} of the edges lead from one to another")
    whole, (fields,) = folder / "whole.pt", graph.node_data.values()
    torch.save(
        [*map(torch.from_numpy, graph.ends()), {key: torch.from_numpy(x[:]) for key, x in fields.items()}], whole
    )
    ways = [(train, whole, 1), (train, parts.json_file, arguments.workers)]
    ways += [(train_out_of_core, parts.json_file, 1)] if arguments.device == "cpu" else []
    runs: dict[str, list[list[Run]]] = {name: [] for name in MODELS}
    for name, of_model in runs.items():
        for who, (target, source, n_workers) in zip(_who(arguments), ways, strict=True):
            found = run_workers(
                *(target, arguments, name, source, folder / f"{name}.pt"),
                n_workers=n_workers,
                n_threads=arguments.workers // n_workers,
                time_limit=arguments.time_limit,
            )
            of_model.append(found)
            last = f"loss {found[0].losses[-1]:.4f}, validation {found[0].validation:.3f}"
            before = f"{max(run.compiling for run in found):.1f} s to compile or load kernels"
            print(f"{f'{name}, {who}'.ljust(40)} {before}, {arguments.epochs} epochs, {last}", file=sys.stderr)
    return runs


def train(_: Any, arguments: argparse.Namespace, name: str, source: Path, trained: Path) -> Run:
    """Train a model in the default mode, on the worker's part of the partitions at `source`, or on a whole graph.

    The one process with the whole graph computes on the CPU, with plain DGL if that is installed. It saves the trained
    parameters. The logits of all are those at these parameters.
    """
    device = torch.device(arguments.device if source.suffix == ".json" else "cpu")
    has_its_own = device.type == "cuda" and torch.cuda.device_count() >= arguments.workers
    sar.initialize_comms(backend="nccl" if has_its_own else None)  # plain DGL has a group of one, for the same loop
    with _autocast(arguments, source, device):
        compiling = _load_code(name, source, device)
    memory = peak_memory(device) if device.type == "cuda" else PeakAnonymous()
    run = _train(arguments, name, source, trained, device)
    return run._replace(peak_memory=memory.above_baseline(), compiling=compiling)


def train_out_of_core(_: Any, arguments: argparse.Namespace, name: str, source: Path, trained: Path) -> Run:
    """Train with one partition in memory at a time; then write the outputs of all nodes, as `sar infer` does."""
    sar.initialize_comms()
    set_allocator(spilled=True)
    device, place = torch.device("cpu"), source.parent
    with _autocast(arguments, source, device):
        compiling = _load_code(name, source, device)
    memory = PeakAnonymous()
    work = partial(_train, arguments, name, source, trained, device)
    threads = run_in_turns(arguments.parts, work, place, arguments.memory)
    if (failure := threads.first_failure()) is not None:
        raise failure[1]
    peak, out = memory.above_baseline(), arguments.out / f"{name}.npy"
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_model = lambda info: MODELS[name](info.in_widths["_N"], info.num_classes)  # noqa: E731
    infer(source, make_model, trained, out=out, workers=arguments.parts, spill=place, memory=arguments.memory)
    logits = np.load(out)
    return threads.results[0]._replace(compiling=compiling, peak_memory=peak, ids=np.arange(len(logits)), logits=logits)


def _autocast(arguments: argparse.Namespace, source: Path, device: torch.device) -> torch.autocast:
    """With `--bf16`, all but the one process with the whole graph compute in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, arguments.bf16 and source.suffix == ".json")


def _train(
    arguments: argparse.Namespace, name: str, source: Path, trained: Path, device: torch.device, _: int = 0
) -> Run:
    graph, x, task, ids = _load(source, device)
    torch.manual_seed(arguments.seed)
    model = MODELS[name](x.shape[1], task.num_classes).to(device)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    losses, seconds = [], []
    sent = sar.comm.statistics().bytes_sent
    for _ in range(arguments.epochs):
        start = time.perf_counter()
        with _autocast(arguments, source, device):
            logits = model(graph, x)
            loss = task.loss(logits)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(sar.all_sum(loss.item()))
        # Without dropout, the training forward's output is what validation would compute.
        validation = task.accuracy(logits, "val")
        seconds.append(time.perf_counter() - start)
    sent = sar.comm.statistics().bytes_sent - sent
    model.eval()
    with torch.no_grad(), _autocast(arguments, source, device):
        accuracy = task.accuracy(model(graph, x), "test")
        if source.suffix == ".pt":
            torch.save(model.state_dict(), trained)
        else:
            model.load_state_dict(torch.load(trained, weights_only=True))
        logits = model(graph, x)
    costs = 0.0, float(np.median(seconds)), accuracy, 0, sent / arguments.epochs
    return Run(losses, validation, *costs, ids.cpu().numpy(), logits.float().cpu().numpy())


def _load_code(name: str, source: Path, device: torch.device) -> float:
    """Train on ten nodes of each worker, so that kernels are compiled and loaded before epochs; returns the seconds."""
    count, start = 10, time.perf_counter()
    ends = torch.arange(count).repeat_interleave(2), torch.arange(2 * count) % count
    if source.suffix == ".pt" and has_dgl():
        graph = dgl_graph(ends[0].numpy(), ends[1].numpy(), count)
    else:
        if has_dgl():
            sar.patch_dgl()
        ranges = [(count * p, count * (p + 1)) for p in range(sar.world_size())]
        own = ends[1] + count * sar.rank()
        shards = [ShardEdgesAndFeatures((ends[0] + first, own), {}) for first, _ in ranges]
        graph = sar.construct_full_graph(PartitionData(shards, ranges, {}, ["_N"], [ONLY_TYPE])).to(device)
    model = MODELS[name](4, 2).to(device)
    model(graph, torch.rand(count, 4, device=device)).sum().backward()
    return time.perf_counter() - start


def _load(source: Path, device: torch.device) -> tuple[Any, Tensor, sar.Task, Tensor]:
    """This worker's part of a partition, or a whole graph of DGL's own, with features, task and the nodes' IDs.

    Without DGL, the whole graph is that of a single worker.
    """
    if source.suffix == ".json":
        part = sar.load_dgl_partition_data(str(source), sar.rank(), device)
        task, x = sar.Task.of(part), sar.suffix_key_lookup(part.node_features, "feat")
        return sar.construct_full_graph(part), x, task, part.node_features["orig_id"]
    src, dst, fields = torch.load(source, weights_only=True)
    num_nodes = len(fields["label"])
    task = sar.Task(fields["label"], {mask.removesuffix("_mask"): fields[mask] for mask in SPLIT})
    if has_dgl():
        graph = dgl_graph(src.numpy(), dst.numpy(), num_nodes)
    else:
        edges = [ShardEdgesAndFeatures((src, dst), {})]
        graph = sar.construct_full_graph(PartitionData(edges, [(0, num_nodes)], {}, ["_N"], [ONLY_TYPE]))
    return graph, fields["feat"], task, torch.arange(num_nodes)


# -- the table and the picture

CAPTION = """\
Workers: {workers} on this host, 1 thread each; the other processes have {workers} threads. With a limit, one of \
{parts} partitions is in memory at a time. Same graph, seeds, initial parameters and epochs, no dropout; rounding \
alone makes the runs drift apart while training.
Seconds are the median epoch of the slowest worker, after kernels are compiled. MB sent and peak memory are the \
largest of any worker.
Peak memory is the highest anonymous memory of a process, minus that before graph and features are loaded, of code, \
which the limit includes.
The logit difference is the largest over all nodes and classes from those of the one process, at the parameters that \
it has trained; with a limit, they are read from the file of outputs."""
IN_BFLOAT16 = "All but the one process with the whole graph computed in bfloat16, by autocast, which is not exact."
ON_DEVICE = "Workers computed on {device}, with the memory of tensors there, and the one process on the CPU."


def _who(arguments: argparse.Namespace) -> list[str]:
    """The first columns of the rows of a model."""
    dtype = ", bfloat16" * arguments.bf16
    if arguments.device != "cpu":
        return [f"1 process, {PLAIN}", f"{arguments.workers} workers, sar, {arguments.device}{dtype}"]
    return [
        f"1 process, {PLAIN}",
        f"{arguments.workers} workers, sar{dtype}",
        f"1 process in {arguments.memory / 2**20:.0f} MiB, sar{dtype}",
    ]


def _table(runs: dict[str, list[list[Run]]], who: list[str]) -> tuple[list[tuple[str, ...]], str]:
    """The rows of the table, the header first, and the ratios to the first row; of several workers, the largest."""
    rows: list[tuple[str, ...]] = [tuple(HEADER.split(", "))]
    ratios = []
    for model, ((single,), *others) in runs.items():
        costs = f"{single.test_accuracy:.4f}", f"{single.seconds:.3f}", "-", f"{single.peak_memory / MEGA:.0f}"
        rows.append((model, who[0], *costs, ""))
        for name, workers in zip(who[1:], others, strict=True):
            seconds, peak = max(run.seconds for run in workers), max(run.peak_memory for run in workers)
            sent = "-" if len(workers) == 1 else f"{max(run.bytes_sent for run in workers) / MEGA:.1f}"
            apart = max(float(np.abs(run.logits - single.logits[run.ids]).max()) for run in workers)
            costs = f"{workers[0].test_accuracy:.4f}", f"{seconds:.3f}", sent, f"{peak / MEGA:.0f}"
            rows.append((model, name, *costs, f"{apart:.1e}"))
            share = peak / max(single.peak_memory, 1)
            ratios.append(f"{model}, {name}: {seconds / single.seconds:.2f}x the time, {share:.2f}x the memory")
    return rows, "Relative to one process:\n" + "\n".join(ratios)


def _draw(runs: dict[str, list[list[Run]]], who: list[str], title: str, file: Path) -> None:
    """Save one picture: the loss curves of each model, and the memory of each process."""
    from matplotlib.figure import Figure

    colors, styles = ("#9db4c0", "#d1495b", "#253d5b"), ((0, ()), (0, (4, 2)), (0, (1, 1.5)))
    figure = Figure(figsize=(4 * (len(runs) + 1), 3.6), dpi=120, layout="constrained")
    *curves, bars = figure.subplots(1, len(runs) + 1)
    position, ticks = 0, []
    for axes, (model, ways) in zip(curves, runs.items(), strict=True):
        for number, workers in enumerate(ways):
            width = 6 if number == 0 else 1.6
            axes.plot(
                workers[0].losses, color=colors[number], linewidth=width, linestyle=styles[number], label=who[number]
            )
            peaks = [run.peak_memory / MEGA for run in workers]
            drawn = bars.bar(range(position, position + len(peaks)), peaks, color=colors[number])
            bars.bar_label(drawn, fmt="%.0f")
            position += len(peaks)
        gap = max(abs(a - b) for way in ways for a, b in zip(ways[0][0].losses, way[0].losses, strict=True))
        axes.set(title=model, xlabel=f"epoch (curves at most {gap:.0e} apart)", ylabel="training loss", ylim=(0, None))
        axes.legend(frameon=False)
        ticks.append((position - (sum(map(len, ways)) + 1) / 2, model))
        position += 1
    bars.set_xticks(*zip(*ticks, strict=True))
    bars.set(title="peak memory of each process (MB)")
    for axes in (*curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file)


# -- the graph


def community_graph(
    num_nodes: int = 20_000,
    num_edges: int = 400_000,
    num_features: int = 64,
    num_classes: int = 8,
    homophily: float = 0.6,
    signal: float = 0.2,
    seed: int = 0,
) -> GraphSource:
    """A degree-corrected stochastic block model (Karrer and Newman, 2011) whose communities are the classes.

    Nodes have a heavy-tailed propensity to take edges. An edge picks one end by propensity, and the other by propensity
    among the same community with probability `homophily`, among all nodes otherwise. Each edge is stored in both
    directions, so `num_edges` is even. Features are a random centroid per class, entries N(0, 1), times `signal`, plus
    independent N(0, 1) noise. Raises `ConfigError` if no such simple graph can be drawn.
    """
    if num_classes < 2 or num_nodes < num_classes or num_edges % 2 or not 0 <= num_edges <= num_nodes**2 // 10:
        raise ConfigError(
            f"cannot draw {num_edges} edges between {num_nodes} nodes of {num_classes} classes; expected at least two "
            f"classes, a node for each, and an even number of edges, at most {num_nodes**2 // 10} for so many nodes."
        )
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.integers(num_classes, size=num_nodes))  # sorted while edges are drawn: classes are ranges
    pairs = _draw_pairs(rng, labels, num_edges // 2, homophily)
    shuffled = rng.permutation(num_nodes)
    labels[shuffled] = labels.copy()
    centroids = rng.standard_normal((num_classes, num_features), dtype=np.float32)
    noise = rng.standard_normal((num_nodes, num_features), dtype=np.float32)
    feat = np.float32(signal) * centroids[labels] + noise
    low, high = shuffled[pairs // num_nodes], shuffled[pairs % num_nodes]
    codes = np.sort(np.concatenate([low * num_nodes + high, high * num_nodes + low]))
    return GraphSource.homogeneous(codes // num_nodes, codes % num_nodes, num_nodes, {"feat": feat, "label": labels})


def _draw_pairs(rng: np.random.Generator, labels: Array, num_pairs: int, homophily: float) -> Array:
    """Distinct undirected pairs without loops, (num_pairs,), coded as low * N + high; `labels` ascend."""
    num_nodes = len(labels)
    propensity = np.minimum(rng.pareto(2.5, size=num_nodes) + 1, 20)
    ends = np.concatenate([[0], np.cumsum(propensity)])
    first, last = (ends[np.searchsorted(labels, labels, side=side)] for side in ("left", "right"))  # (N,) each

    def pick(low: Array, high: Array) -> Array:
        return np.clip(np.searchsorted(ends, rng.uniform(low, high), side="right") - 1, 0, num_nodes - 1)

    pairs = np.empty(0, dtype=np.int64)
    for _ in range(100):
        everything = np.zeros(num_pairs), np.full(num_pairs, ends[-1])
        u = pick(*everything)
        within = rng.random(num_pairs) < homophily
        v = pick(np.where(within, first[u], everything[0]), np.where(within, last[u], everything[1]))
        fresh = np.minimum(u, v) * num_nodes + np.maximum(u, v)
        pairs = np.unique(np.concatenate([pairs, fresh[u != v]]))
        if len(pairs) >= num_pairs:
            return rng.permutation(pairs)[:num_pairs]
    raise ConfigError(f"found only {len(pairs)} of {num_pairs} distinct pairs; ask for fewer edges or more nodes.")
