"""The measured processes: train one model on a whole graph without sar, or with sar on one partition."""

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import sar
from benchmarks.floors import aggregation_time, dense_time
from benchmarks.graphs import Graph
from benchmarks.models import Model, PygModel
from sar.comm.allocator import set_allocator
from sar.host.cuda import peak_memory
from sar.kernels import load_kernels

DGL, PYG, PYG_CSR = "dgl", "pyg", "pyg, CSR"
"""Libraries of layers. PyTorch Geometric takes an edge index or a sparse matrix."""


@dataclass(frozen=True)
class Job:
    """A model and its training settings."""

    model: str
    num_classes: int
    warm_up: int  # first epochs, not timed; their memory counts
    epochs: int
    seed: int
    layers: str = DGL
    mode: int = 1  # 1, 2 or 3 (docs/api/names.md, "Three modes")
    wire: str | None = None  # dtype of sent rows; None: exact
    allocator: str = "least"  # `Config.allocator`
    device: str = "cpu"
    floors: bool = False  # also measure the lower bounds
    bf16: bool = False  # run the forward under autocast in bfloat16
    seeds: int = 0  # number of seeds to train and test with; 0: train once without a test


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of one worker in the median epoch, from the library's counters and the lower bounds."""

    sent: float
    received: float
    waited: float
    dense: float = 0.0
    aggregation: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """Results of one process."""

    num_nodes: int
    losses: list[float]  # of all epochs and workers; empty if the device ran out of memory
    seconds: list[float]  # of the timed epochs
    rise: float  # peak memory above the level before the first epoch, in bytes
    traffic: Traffic = Traffic(0, 0, 0)
    accuracies: Sequence[float] = ()  # test accuracy by seed, over all workers


def single(_: Callable[[Any], None], job: Job, graph_file: Path) -> Measurement:
    """Train on the whole graph without sar, with the same allocator and huge pages."""
    sar.Config.allocator = job.allocator
    set_allocator()
    graph = Graph.load(graph_file)
    edges: Any
    if job.layers == DGL:
        edges = graph.to_dgl()
        edges.create_formats_()  # otherwise the first epoch would
    else:
        edges = torch.from_numpy(np.stack([graph.src, graph.dst])).to(job.device)
    fields = [torch.from_numpy(rows).to(job.device) for rows in (graph.feat, graph.label, graph.train_mask)]
    del graph
    if job.layers == PYG_CSR:
        edges = _as_csr(edges, len(fields[0]))
    return _train(job, edges, *fields)


def worker(_: Callable[[Any], None], job: Job, partition_json: Path) -> Measurement:
    """Train on this worker's partition with sar."""
    sar.Config.disable_sr = job.mode == 2
    sar.Config.allocator = job.allocator
    if job.wire is not None:
        sar.Config.wire_dtype_features = sar.Config.wire_dtype_gradients = getattr(torch, job.wire)
    has_its_own = job.device == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    sar.initialize_comms(backend="nccl" if has_its_own else None)
    load_kernels()
    data = sar.load_dgl_partition_data(str(partition_json), sar.rank(), job.device)
    graph = sar.construct_full_graph(data)
    fields = [sar.suffix_key_lookup(data.node_features, name) for name in ("feat", "label", "train_mask")]
    del data
    if job.mode == 3:
        graph = graph.get_full_partition_graph()
    edges = graph if job.layers == DGL else sar.pyg.edge_index(graph)
    if not job.seeds:
        return _train(job, edges, *fields)
    with ProductsInFloat32() if job.bf16 and not multiplies_bfloat16() else nullcontext():
        runs = [_train(replace(job, seed=job.seed + i), edges, *fields) for i in range(job.seeds)]
    return replace(runs[0], accuracies=[run.accuracies[0] for run in runs])


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


class ProductsInFloat32(TorchDispatchMode):
    """Computes bfloat16 products in float32, which is faster on a processor without bfloat16 instructions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        return func(*(x.float() for x in args), **(kwargs or {})).bfloat16()


def _train(job: Job, edges: Any, x: Tensor, labels: Tensor, train: Tensor) -> Measurement:
    """The training loop, for one process or several."""
    together = sar.comm.is_initialized()
    n_train = sar.all_sum(int(train.sum())) if together else int(train.sum())
    torch.manual_seed(job.seed)
    model = (Model if job.layers == DGL else PygModel)(job.model, x.shape[1], job.num_classes).to(x.device)
    mixes = job.model != "GAT" or job.layers != DGL or together  # DGL's GAT fails under autocast on CPUs
    autocast = partial(torch.autocast, x.device.type, torch.bfloat16, job.bf16 and mixes)
    if job.bf16 and not mixes:
        model, x = model.bfloat16(), x.bfloat16()
    if together:
        sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, seconds, moved = [], [], []
    memory = peak_memory(x.device)
    try:
        for _ in range(job.warm_up + job.epochs):
            before, start = sar.comm.statistics(), time.perf_counter()
            with autocast():
                loss = functional.cross_entropy(model(edges, x)[train], labels[train], reduction="sum") / n_train
            optimizer.zero_grad()
            loss.backward()
            if together:
                sar.gather_grads(model)
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            moved.append(sar.comm.statistics() - before)
    except torch.OutOfMemoryError:
        return Measurement(len(x), [], [math.inf], math.inf)
    rise = memory.above_baseline()
    if job.seeds:
        with torch.no_grad(), autocast():
            right = (model(edges, x).argmax(1) == labels)[~train]
        accuracy = sar.all_sum(int(right.sum())) / sar.all_sum(len(right))
        return Measurement(len(x), [], seconds, rise, accuracies=[accuracy])
    if not together:
        return Measurement(len(x), losses, seconds[job.warm_up :], rise)
    traffic = Traffic(
        median(epoch.bytes_sent for epoch in moved[job.warm_up :]),
        median(epoch.bytes_received for epoch in moved[job.warm_up :]),
        median(epoch.seconds_waited for epoch in moved[job.warm_up :]),
        *(_floors(model, edges, (x, labels, train), job.epochs) if job.floors else ()),
    )
    return Measurement(len(x), [sar.all_sum(loss) for loss in losses], seconds[job.warm_up :], rise, traffic)


def _floors(model: Model, graph: Any, fields: tuple[Tensor, Tensor, Tensor], repeats: int) -> tuple[float, float]:
    """Seconds of an epoch's dense layers and aggregations, with all workers computing at the same time."""
    sar.Config.check_replicas = False  # workers train separately from here on
    sar.all_sum(0)
    dense = median(dense_time(model, *fields) for _ in range(repeats))
    sar.all_sum(0)
    relation = graph.call_context().relation
    return dense, median(aggregation_time(relation, model.exchanged()) for _ in range(repeats))


def _as_csr(edges: Tensor, num_nodes: int) -> Tensor:
    """An edge index as a transposed sparse matrix, as PyTorch Geometric's layers expect."""
    warnings.filterwarnings("ignore", ".*[Ss]parse.*", UserWarning)  # torch's
    ones = torch.ones(edges.shape[1], device=edges.device)
    return torch.sparse_coo_tensor(edges.flip(0), ones, (num_nodes, num_nodes)).coalesce().to_sparse_csr()
