"""The measured processes of the mini-batch benchmark: train SAGE on batches from one of several loaders.

As a program, `python -m benchmarks.minibatch_training JOB FOLDER`, it is a trainer of a DistDGL cluster.
"""

import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples import distdgl_cluster  # noqa: F401  # isort: skip  (makes one machine stand for several)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import sar
from benchmarks.graphs import Graph
from benchmarks.models import Model
from sar.adapters.dgl.shim import require_dgl
from sar.comm.allocator import set_allocator
from sar.host.memory import PeakMemory

GRAPH_NAME = "graph"


@dataclass(frozen=True)
class Job:
    """The training settings."""

    num_classes: int
    fanouts: list[int]  # of the three layers
    batch_size: int  # of each trainer
    trainers: int  # a single process multiplies its batch size by this
    samplers: int  # `num_workers` of each trainer: processes of DGL, batches ahead of sar's
    epochs: int
    seed: int
    allocator: str = "system"  # `Config.allocator`, also of DGL's processes


@dataclass(frozen=True)
class Measured:
    """Results of one trainer; lists are by epoch."""

    seconds: list[float]
    fetching: list[float]  # seconds of waiting for batches with their features
    batches: int  # of an epoch
    seeds: int  # of an epoch
    resident: int  # peak resident memory in bytes, shared memory included


Batch = tuple[Any, Tensor, Tensor]
"""Blocks, features of the input nodes, and labels of the outputs."""
Epoch = Callable[[], Iterable[Batch]]
"""Gives the batches of an epoch."""


def single(_: Callable[[Any], None], job: Job, graph_file: Path) -> Measured:
    """DGL's loader on the whole graph."""
    _set_allocator(job)
    warnings.filterwarnings("ignore", "Dataloader CPU affinity")
    dgl = require_dgl()
    graph = Graph.load(graph_file).to_dgl().formats("csc")
    train = graph.ndata.pop("train_mask")
    sampler = dgl.dataloading.NeighborSampler(job.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = dgl.dataloading.DataLoader(
        graph,
        train.nonzero().squeeze(1),
        sampler,
        batch_size=job.batch_size * job.trainers,
        shuffle=True,
        num_workers=job.samplers,
    )

    def epoch() -> Iterator[Batch]:
        for _, _, blocks in loader:
            yield blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]

    model = _model(job, graph.ndata["feat"].shape[1])
    return _train(model, model, epoch, job)


def worker(_: Callable[[Any], None], job: Job, partition_json: Path) -> Measured:
    """The library's loader."""
    _set_allocator(job)
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(str(partition_json), sar.rank(), "cpu")
    x, labels, train = (sar.suffix_key_lookup(data.node_features, key) for key in ("feat", "label", "train_mask"))
    graph = sar.construct_full_graph(data)
    sampler = sar.DistNeighborSampler(
        job.fanouts,
        input_node_features={"feat": x},
        output_node_features={"label": labels},
        copy_edata=False,
    )
    loader = sar.DataLoader(
        graph,
        sar.split_seeds(graph, train),  # as many for each trainer, like DistDGL's `node_split`
        sampler,
        job.batch_size,
        shuffle=True,
        num_workers=job.samplers,
        foreign_seeds=True,
    )

    def epoch() -> Iterator[Batch]:
        for blocks in loader:
            yield blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]

    # Blocks are a trainer's own and shares are equal, so that DDP serves as it does with DistDGL.
    model = _model(job, x.shape[1])
    ddp = DistributedDataParallel(model)
    return _train(model, ddp, epoch, job)


def distdgl(job: Job) -> Measured:
    """DistDGL's loader and DDP, as its users write it."""
    _set_allocator(job)
    distributed, dataloading = require_dgl().distributed, require_dgl().dataloading
    distributed.initialize(os.environ["DGL_IP_CONFIG"])
    dist.init_process_group("gloo")
    graph = distributed.DistGraph(GRAPH_NAME)
    nodes = distributed.node_split(graph.ndata["train_mask"], graph.get_partition_book(), force_even=True)
    loader = dataloading.DistNodeDataLoader(
        graph, nodes, dataloading.NeighborSampler(job.fanouts), batch_size=job.batch_size, shuffle=True
    )
    model = _model(job, graph.ndata["feat"].shape[1])
    ddp = DistributedDataParallel(model)

    def epoch() -> Iterator[Batch]:
        with ddp.join():  # one trainer may have a batch more than another
            for inputs, seeds, blocks in loader:
                yield blocks, graph.ndata["feat"][inputs], graph.ndata["label"][seeds]

    return _train(model, ddp, epoch, job)


def _set_allocator(job: Job) -> None:
    sar.Config.allocator = job.allocator
    set_allocator()


def _model(job: Job, num_features: int) -> Model:
    torch.manual_seed(job.seed)
    return Model("SAGE", num_features, job.num_classes)


def _train(model: Model, forward: Callable[[Any, Tensor], Tensor], epoch: Epoch, job: Job) -> Measured:
    """The training loop; `forward` is the model, or DDP around it, which averages gradients."""
    initial = copy.deepcopy(model.state_dict())
    _train_epoch(forward, epoch, torch.optim.Adam(model.parameters()))  # loads and compiles code
    model.load_state_dict(initial)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    memory = PeakMemory()
    epochs = [_train_epoch(forward, epoch, optimizer) for _ in range(job.epochs)]
    seconds, fetching, batches, seeds = (list(values) for values in zip(*epochs, strict=True))
    return Measured(seconds, fetching, batches[-1], seeds[-1], memory.baseline + memory.above_baseline())


def _train_epoch(
    forward: Callable[[Any, Tensor], Tensor], epoch: Epoch, optimizer: torch.optim.Optimizer
) -> tuple[float, float, int, int]:
    """Train one epoch; returns seconds, seconds of fetching, batches and seeds, as in `Measured`."""
    batches = seeds = 0
    fetching = 0.0
    start = mark = time.perf_counter()
    for blocks, x, labels in epoch():
        fetching += time.perf_counter() - mark
        loss = functional.cross_entropy(forward(blocks, x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batches, seeds = batches + 1, seeds + len(labels)
        mark = time.perf_counter()
    end = time.perf_counter()
    return end - start, fetching + end - mark, batches, seeds


def main() -> None:
    """A DistDGL trainer: reads its job from a file, and writes its results to another."""
    job_file, folder = map(Path, sys.argv[1:])
    measured = distdgl(Job(**json.loads(job_file.read_text())))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
