"""Epoch time and memory of PyTorch Geometric's layers, on one process and across workers: `python -m benchmarks.pyg`.

One process takes its edges as `edge_index`, or as a sparse CSR tensor where a layer can use one. All train alike, and a
run whose losses are not those of the first is an error.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import sar
from benchmarks import command
from benchmarks.graphs import prepare
from benchmarks.models import HEAD_WIDTH, HEADS, HIDDEN
from benchmarks.npz import read_npz
from benchmarks.report import describe_setting, write_section
from benchmarks.runs import LOSS_TOLERANCE, threads_each
from benchmarks.summary import Spread
from sar.comm.allocator import set_allocator
from sar.errors import SarError
from sar.host.cuda import peak_memory
from sar.host.processes import run_workers
from sar.partition.inspect.text_tables import as_markdown, as_text

HEADER = "model", "trained by", "s / epoch", "time / PyG", "peak memory of a worker (MB)", "memory x W / PyG"
INDEX, CSR = "PyG, edge_index", "PyG, sparse CSR"


@dataclass(frozen=True)
class Job:
    """What to train: the model of `benchmarks.models` of that name, with PyTorch Geometric's layers."""

    model: str
    num_classes: int
    warm_up: int
    epochs: int
    seed: int
    csr: bool = False


@dataclass(frozen=True)
class Measured:
    """Of one process: losses of all workers and seconds of all epochs, and the rise of its memory in bytes."""

    losses: list[float]
    seconds: list[float]
    rise: int


class Model(nn.Module):
    """Three layers with ReLU between them, no dropout, as `benchmarks.models.Model`."""

    def __init__(self, name: str, num_features: int, num_classes: int):
        super().__init__()
        hidden = HEADS * HEAD_WIDTH if name == "GAT" else HIDDEN
        kinds: dict[str, Callable[[int, int, bool], nn.Module]] = {
            "SAGE": lambda i, o, last: SAGEConv(i, o),
            "GCN": lambda i, o, last: GCNConv(i, o, add_self_loops=False, cached=True),
            "GIN": lambda i, o, last: GINConv(nn.Linear(i, o)),
            "GAT": lambda i, o, last: GATConv(i, *((o, 1) if last else (HEAD_WIDTH, HEADS)), add_self_loops=False),
        }
        widths = pairwise([num_features, hidden, hidden, num_classes])
        self.layers = nn.ModuleList(kinds[name](i, o, k == 2) for k, (i, o) in enumerate(widths))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # (N, F) -> (N, C)
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x, edge_index))
        out: Tensor = self.layers[-1](x, edge_index)
        return out


def single(_: Callable[[Any], None], job: Job, graph_file: Path) -> Measured:
    """Train on the whole graph in one process, with the allocator and the huge pages of the workers."""
    set_allocator()
    data = read_npz(graph_file)
    x, y, mask = (torch.from_numpy(data.node_data["_N"][name]) for name in ("feat", "label", "train_mask"))
    edges = torch.from_numpy(np.stack(data.ends()))
    if job.csr:
        edges = as_csr(edges, data.total_nodes)
    return train(job, x, edges, y, mask, int(mask.sum()))


def worker(_: Callable[[Any], None], job: Job, partition_json: Path) -> Measured:
    """Train on this worker's part."""
    sar.initialize_comms()
    data = sar.pyg.load_partition(partition_json)
    num_train = sar.all_sum(int(data.train_mask.sum()))
    return train(job, data.x, data.edge_index, data.y, data.train_mask.bool(), num_train)


def as_csr(edges: Tensor, num_nodes: int) -> Tensor:
    """The edge index as a sparse matrix, transposed, as PyTorch Geometric's layers want it."""
    warnings.filterwarnings("ignore", ".*[Ss]parse.*", UserWarning)  # torch's
    ones = torch.ones(edges.shape[1], device=edges.device)
    return torch.sparse_coo_tensor(edges.flip(0), ones, (num_nodes, num_nodes)).coalesce().to_sparse_csr()


def train(job: Job, x: Tensor, edges: Tensor, y: Tensor, mask: Tensor, num_train: int) -> Measured:
    """Train on the device of `x`, with all other workers where there are any."""
    torch.manual_seed(job.seed)
    model, together = Model(job.model, x.shape[1], job.num_classes).to(x.device), sar.comm.is_initialized()
    if together:
        sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, seconds, memory = [], [], peak_memory(x.device)
    for _ in range(job.warm_up + job.epochs):
        start = time.perf_counter()
        loss = functional.cross_entropy(model(x, edges)[mask], y[mask], reduction="sum") / num_train
        optimizer.zero_grad()
        loss.backward()
        if together:
            sar.gather_grads(model)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    rise = memory.above_baseline()
    return Measured(list(map(sar.all_sum, losses)) if together else losses, seconds[job.warm_up :], rise)


def main(argv: Sequence[str]) -> None:
    """Measure, print the table, and write it to the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pyg", description=__doc__)
    command.add_common(parser, workers=(1, 2, 4))
    arguments = parser.parse_args(argv)
    with command.work_directory(arguments.work) as work:
        graph = prepare("rmat", command.size_of(arguments), arguments.data, work, arguments.seed)
        runs: dict[tuple[str, str], list[list[Measured]]] = {}
        for _ in range(arguments.repeats):
            for model in arguments.models:
                job = Job(model, graph.num_classes, arguments.warm_up, arguments.epochs, arguments.seed)
                for name, target, file, count, threads in _rows(job, graph, arguments):
                    done = run_workers(
                        target,
                        Job(**{**vars(job), "csr": name == CSR}),
                        file,
                        n_workers=count,
                        n_threads=threads,
                        time_limit=arguments.time_limit,
                    )
                    runs.setdefault((model, name), []).append(done)
                    check_losses(done, runs[model, INDEX][0], f"{model}, {name}")
                    print(f"{model}, {name}: {_seconds([done]):.3f} s an epoch", flush=True)
    rows = [HEADER, *(_row(key, found, runs[key[0], INDEX]) for key, found in runs.items())]
    print(f"\n{as_text(rows)}")
    conditions = command.setting_of("benchmarks.pyg", argv, arguments)
    write_section(arguments.docs / "benchmarks.md", "pyg", f"{describe_setting(conditions)}\n\n{as_markdown(rows)}")


def _rows(job: Job, graph: Any, arguments: argparse.Namespace) -> list[tuple[str, Any, Path, int, int]]:
    """Name, target, file, processes and threads of each row; GAT has no use for CSR."""
    alone = [INDEX] if job.model == "GAT" else [INDEX, CSR]
    return [
        *((name, single, graph.file, 1, arguments.threads) for name in alone),
        *(
            (f"sar, W = {count}", worker, graph.partitions(count), count, threads_each(arguments.threads, count))
            for count in arguments.workers
        ),
    ]


def check_losses(done: list[Measured], expected: list[Measured], what: str) -> None:
    """Raise where the losses are not those of `expected`."""
    pairs = zip(done[0].losses, expected[0].losses, strict=True)
    worst = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
    if not worst <= LOSS_TOLERANCE:
        raise SarError(f"{what}: a loss differs by {worst:.2e} from that of one process; expected the same.")


def _seconds(found: list[list[Measured]]) -> float:
    """The median over runs of the slowest worker's median epoch."""
    return median(max(median(process.seconds) for process in run) for run in found)


def _rise(found: list[list[Measured]]) -> float:
    return median(max(process.rise for process in run) for run in found) / 1e6


def _row(key: tuple[str, str], found: list[list[Measured]], alone: list[list[Measured]]) -> tuple[str, ...]:
    return (
        *key,
        Spread.of(_seconds([run]) for run in found).text(3),
        f"{_seconds(found) / _seconds(alone):.2f}",
        f"{_rise(found):.0f}",
        f"{_rise(found) * len(found[0]) / _rise(alone):.2f}",
    )


if __name__ == "__main__":
    command.run_main(main)
