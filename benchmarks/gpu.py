"""Epochs of four models on one GPU beside PyTorch Geometric's, and single kernels: `python -m benchmarks.gpu`.

All in one process. The tables go into docs/gpus.md. `--device cpu` tries the benchmark if there is no GPU.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import sar
from benchmarks import command
from benchmarks.graphs import NUM_CLASSES, rmat_graph, with_fields
from benchmarks.measure import FIELDS
from benchmarks.models import HEAD_WIDTH, HEADS, HIDDEN, MODELS
from benchmarks.pyg import CSR, INDEX, Job, Measured, as_csr, check_losses, train
from benchmarks.report import describe_setting, write_section
from benchmarks.results import setting
from sar.common_tuples import PartitionData, ShardEdgesAndFeatures
from sar.errors import ConfigError
from sar.host.cuda import why_no_cuda
from sar.kernels import (
    EdgeBlock,
    EdgeMessage,
    EdgeOperand,
    Op,
    Target,
    aggregate_cmp,
    aggregate_grad,
    aggregate_sum,
    index_dtype,
)
from sar.kernels.attention import attend, attend_grad, destination_statistics, note_scores
from sar.kernels.ops import (
    STATISTICS,
    Attention,
    AttentionOperands,
    Gradients,
    OnlineSoftmaxState,
    Score,
)
from sar.partition.in_memory import training_graph
from sar.partition.inspect.text_tables import as_markdown, as_text

EPOCHS = "edges", "model", "trained by", "s / epoch", "time / PyG", "peak memory (MB)", "memory / PyG"
KERNELS = "edges", "kernel", "features", "ms", "GB / s", "of the bandwidth"
SAR = "sar"


class Graph(NamedTuple):
    """An R-MAT graph with self-loops, and random node fields, on the device."""

    edges: Tensor  # (2, E) int64
    x: Tensor  # (N, F)
    y: Tensor  # (N,)
    mask: Tensor  # (N,), of training nodes


def make_graph(nodes: int, edges: int, features: int, device: torch.device) -> Graph:
    """The same graph at every call."""
    drawn = training_graph(with_fields(rmat_graph(nodes, edges), features, 0), undirected=False)
    fields = (torch.from_numpy(drawn.node_data["_N"][name]).to(device) for name in FIELDS)
    return Graph(torch.from_numpy(np.stack(drawn.ends())).to(device), *fields)


def distributed(graph: Graph) -> Any:
    """The graph as sar's, on one worker."""
    nodes, (src, dst) = len(graph.x), graph.edges
    shard = ShardEdgesAndFeatures((src, dst), {})
    return sar.construct_full_graph(PartitionData([shard], [(0, nodes)], {}, ["_N"], [("_N", "_E", "_N")]))


# -- epochs


def epochs(graph: Graph, arguments: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A row for each model and way to train it; losses are compared with PyTorch Geometric's."""
    for model in arguments.models:
        job = Job(model, NUM_CLASSES, arguments.warm_up, arguments.epochs, 0)
        alone = None
        for way in (INDEX, SAR) if model == "GAT" else (INDEX, CSR, SAR):
            found = train_by(job, graph, way)
            if found is not None and alone is not None:
                check_losses([found], [alone], f"{model}, {way}")
            alone = found if way == INDEX else alone
            row = (f"{graph.edges.shape[1]:,}", model, way, *_costs(found, alone))
            print("  ".join(row), flush=True)
            yield row


def train_by(job: Job, graph: Graph, way: str) -> Measured | None:
    """Train on the graph as sar's or as one of PyTorch Geometric's; None where the device has too little memory."""
    try:
        edges: Any = graph.edges
        if way == CSR:
            edges = as_csr(edges, len(graph.x))
        elif way == SAR:
            edges = sar.pyg.edge_index(distributed(graph))
        return train(job, graph.x, edges, graph.y, graph.mask, int(graph.mask.sum()))
    except torch.OutOfMemoryError:
        return None
    finally:
        edges = None
        gc.collect()
        if graph.x.is_cuda:
            torch.cuda.empty_cache()


def _costs(found: Measured | None, alone: Measured | None) -> tuple[str, ...]:
    if found is None:
        return "out of memory", "", "", ""
    seconds, ratios = median(found.seconds), ("", "")
    if alone is not None:
        ratios = f"{seconds / median(alone.seconds):.2f}", f"{found.rise / max(alone.rise, 1):.2f}"
    return f"{seconds:.4f}", ratios[0], f"{found.rise / 1e6:.0f}", ratios[1]


# -- kernels


class Kernel(NamedTuple):
    """call: runs it once; moved: bytes that it reads and writes, the row of each edge anew."""

    name: str
    call: Callable[[], object]
    moved: int


def kernels(block: EdgeBlock, dtype: torch.dtype, device: torch.device) -> Iterator[Kernel]:
    """Of the layers of the models: sums and maxima of rows of `HIDDEN`, attention with `HEADS` heads."""
    nodes, edges, item = block.num_dst, block.num_edges, dtype.itemsize
    x, w = torch.rand(nodes, HIDDEN, device=device).to(dtype), torch.rand(edges, 1, device=device).to(dtype)
    out = torch.zeros(nodes, HIDDEN, device=device)
    rows = edges * (HIDDEN * item + 4) + 2 * out.nbytes
    copy = EdgeMessage(Op.COPY, EdgeOperand.of(x, Target.U))
    weighted = EdgeMessage(Op.MUL, EdgeOperand.of(x, Target.U), EdgeOperand.of(w, Target.E))
    yield Kernel("sum", lambda: aggregate_sum(block, copy, out), rows)
    yield Kernel("weighted sum", lambda: aggregate_sum(block, weighted, out), rows + w.nbytes)
    constant = EdgeMessage(Op.COPY, EdgeOperand(None, Target.U, (HIDDEN,)))
    grad = EdgeOperand.of(x, Target.V)
    yield Kernel("gradient of a sum", lambda: aggregate_grad(block, constant, "lhs", grad, out), rows)
    peak = torch.full((nodes, HIDDEN), -torch.inf, dtype=dtype, device=device)
    argmax = torch.full(peak.shape, -1, dtype=index_dtype(edges), device=device)
    moved = edges * (HIDDEN * item + 4) + 2 * (peak.nbytes + argmax.nbytes)
    yield Kernel("maximum", lambda: aggregate_cmp(block, copy, peak, argmax, largest=True), moved)
    if dtype == torch.float32:
        size = (nodes, block.num_src)
        ones, by_row = torch.ones(edges, device=device), (block.indptr.int(), block.cols)
        csr, of_weights = (torch.sparse_csr_tensor(*by_row, values, size) for values in (ones, w.squeeze(1)))
        yield Kernel("sum, torch's CSR", lambda: torch.addmm(out, csr, x, out=out), rows)
        yield Kernel("weighted sum, torch's CSR", lambda: torch.addmm(out, of_weights, x, out=out), rows + w.nbytes)
        yield from attention_kernels(block, device)


def attention_kernels(block: EdgeBlock, device: torch.device) -> Iterator[Kernel]:
    """In float32, which layers take for it whatever their features are."""
    nodes, edges, shape = block.num_dst, block.num_edges, (HEADS, HEAD_WIDTH)
    how = Attention(Score.ADDITIVE, 0.2)
    x, y, attn = (torch.rand(size, device=device) for size in ((nodes, *shape), (nodes, HEADS), shape))
    operands = AttentionOperands(x, y, attn, None)
    state = OnlineSoftmaxState.start(nodes, x)
    rows = edges * (HEADS * (HEAD_WIDTH + 1) * 4 + 4)
    yield Kernel("attention", lambda: attend(block, how, operands, state), rows + 2 * state.out.nbytes)
    degrees = torch.bincount(block.destinations(0, edges), minlength=nodes)
    out, normaliser = state.finish(degrees)
    stats = destination_statistics(how, normaliser, x, out)
    note_scores(how, stats, y)
    grads = Gradients(
        torch.zeros_like(out), torch.zeros(nodes, HEADS, device=device), torch.zeros(shape, device=device), None
    )
    moved = 2 * rows + edges * STATISTICS * HEADS * 4 + 2 * grads.x.nbytes
    yield Kernel("its gradient", lambda: attend_grad(block, how, operands, x, stats, grads), moved)


def measure_kernels(graph: Graph, repeats: int) -> Iterator[tuple[str, ...]]:
    """A row for each kernel and dtype, with its share of the bandwidth of a copy."""
    device, edges = graph.x.device, f"{graph.edges.shape[1]:,}"
    (block,) = distributed(graph).call_context().relation.blocks
    buffer = torch.empty(2**29 if device.type == "cuda" else 2**20, dtype=torch.int8, device=device)
    target = torch.empty_like(buffer)
    bandwidth = 2 * buffer.nbytes / seconds_of(lambda: target.copy_(buffer), device, repeats)
    yield edges, "copy", "int8", "", f"{bandwidth / 1e9:.0f}", "100%"
    for dtype in (torch.float32, torch.bfloat16):
        try:
            for kernel in kernels(block, dtype, device):
                seconds = seconds_of(kernel.call, device, repeats)
                rate = kernel.moved / seconds
                cells = f"{1e3 * seconds:.3f}", f"{rate / 1e9:.0f}", f"{rate / bandwidth:.0%}"
                row = (edges, kernel.name, str(dtype).removeprefix("torch."), *cells)
                print("  ".join(row), flush=True)
                yield row
        except torch.OutOfMemoryError:
            yield edges, "out of memory", str(dtype).removeprefix("torch."), "", "", ""


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of some runs after two to warm up."""
    taken = []
    for _ in range(2 + repeats):
        _wait_for(device)
        start = time.perf_counter()
        call()
        _wait_for(device)
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str]) -> None:
    """Measure, print the tables, and write them into docs/gpus.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda", help="(%(default)s)")
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="(all)")
    add("--edges", nargs="+", type=int, default=[10**6, 10**7, 10**8], metavar="E", help="(%(default)s)")
    add("--nodes", type=int, metavar="N", help="default: a 25th of the edges")
    add("--features", type=int, default=128, metavar="F", help="(%(default)s)")
    add("--epochs", type=int, default=5, metavar="N", help="that are timed, and runs of each kernel (%(default)s)")
    add("--warm-up", type=int, default=2, metavar="N", help="epochs before them (%(default)s)")
    add("--docs", type=Path, metavar="DIR", help="gets gpus.md; default: docs/ of this repository, for a GPU")
    arguments = parser.parse_args(argv)
    if arguments.device.startswith("cuda") and (reason := why_no_cuda()) is not None:
        raise ConfigError(f"no GPU: {reason}. `--device cpu` tries the benchmark.")
    device = torch.device(arguments.device)
    sar.initialize_comms()
    tables: list[list[tuple[str, ...]]] = [[EPOCHS], [KERNELS]]
    for edges in arguments.edges:
        graph = make_graph(arguments.nodes or edges // 25, edges, arguments.features, device)
        tables[0] += epochs(graph, arguments)
        tables[1] += measure_kernels(graph, arguments.epochs)
        del graph
    for rows in tables:
        print(f"\n{as_text(rows)}")
    docs = arguments.docs or (command.DOCS if device.type == "cuda" else None)
    if docs is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        versions = f"CUDA {torch.version.cuda}, torch {torch.__version__}"
        options = {"device": f"{name}, {versions}", "timed": f"the median of {arguments.epochs}"}
        conditions = describe_setting(setting(command.shown("benchmarks.gpu", argv), options))
        write_section(docs / "gpus.md", "measured", "\n\n".join([conditions, *map(as_markdown, tables)]))


if __name__ == "__main__":
    command.run_main(main)
