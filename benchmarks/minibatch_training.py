"""What the measured processes of the mini-batch benchmark do: train SAGE on batches from one of several loaders.

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
from typing import Any, NamedTuple

from examples import distdgl_cluster  # noqa: F401  # isort: skip  (makes one machine stand for several)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import sar
from benchmarks.measure import without_huge_pages
from benchmarks.models import Model
from sar.adapters.dgl.models import dgl_graph
from sar.adapters.dgl.shim import require_dgl
from sar.comm.allocator import set_allocator
from sar.host.memory import PeakMemory
from sar.partition.graph_data import read_npz

GRAPH_NAME = "graph"

UNLABELLED = -100
"""What `cross_entropy` leaves out."""


@dataclass(frozen=True)
class Job:
    """What to train, and how; three layers.

    fanouts: of each layer; batch_size: of each trainer.
    trainers: how many there are; one process alone takes batches that many times as large.
    samplers: background processes of each trainer.
    evaluate: take the test accuracy on the whole graph after each epoch.
    allocator: `Config.allocator`, of DGL's processes too.
    """

    num_classes: int
    fanouts: list[int]
    batch_size: int
    trainers: int
    samplers: int
    epochs: int
    learning_rate: float
    seed: int
    evaluate: bool
    allocator: str = "least"


@dataclass(frozen=True)
class Measured:
    """What one trainer reports, by epoch where it is a list.

    seconds: without evaluation; fetching: those until the next batch was there, with its features.
    batches, seeds: of an epoch.
    accuracies: on the whole graph's test nodes, if asked for.
    resident: peak of resident memory while training, in bytes; shared memory counts.
    """

    seconds: list[float]
    fetching: list[float]
    batches: int
    seeds: int
    accuracies: list[float]
    resident: int


Batch = tuple[Any, Tensor, Tensor]
"""Blocks (or the graph), features of the input nodes, and labels of the outputs, `UNLABELLED` if not to train on."""


class _Loader(NamedTuple):
    """Where batches come from, and how trainers work together.

    epoch: the batches of one epoch.
    loss: of logits and labels; its gradients are summed over trainers by `gather_gradients`, or averaged by DDP.
    gather_gradients: called after the backward.
    accuracy: of a model on all test nodes.
    """

    epoch: Callable[[], Iterable[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]
    gather_gradients: Callable[[Model], None]
    accuracy: Callable[[Model], float]


def single(_: Callable[[Any], None], job: Job, graph_file: Path) -> Measured:
    """DGL's loader on the whole graph."""
    without_huge_pages()
    _set_allocator(job)
    warnings.filterwarnings("ignore", "Dataloader CPU affinity")
    dgl = require_dgl()
    data = read_npz(graph_file)
    graph = dgl_graph(torch.from_numpy(data.src), torch.from_numpy(data.dst), data.num_nodes).formats("csc")
    graph.ndata.update({key: torch.from_numpy(data.node_data[key]) for key in ("feat", "label")})
    train, test = (torch.from_numpy(data.node_data[f"{part}_mask"]) for part in ("train", "test"))
    del data
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

    def accuracy(model: Model) -> float:
        right = model(graph, graph.ndata["feat"]).argmax(1) == graph.ndata["label"]
        return float(right[test].double().mean())

    model = _model(job, graph.ndata["feat"].shape[1])
    return _train(model, model, _Loader(epoch, functional.cross_entropy, lambda _: None, accuracy), job)


def worker(_: Callable[[Any], None], job: Job, partition_json: Path, cached: float = 0) -> Measured:
    """The library's loader; it keeps features of remote nodes, up to the fraction `cached` of the worker's own."""
    _set_allocator(job)
    graph, x, labels, masks = _part(partition_json)
    sampler = sar.DistNeighborSampler(
        job.fanouts,
        input_node_features={"feat": x},
        output_node_features={"label": labels},
        copy_edata=False,
        feature_cache_bytes=int(cached * x.nbytes),
    )
    loader = sar.DataLoader(
        graph,
        sar.split_seeds(graph, masks["train"]),  # as many for each trainer, like DistDGL's `node_split`
        sampler,
        job.batch_size,
        shuffle=True,
        num_workers=job.samplers,
        foreign_seeds=True,
    )

    def epoch() -> Iterator[Batch]:
        for blocks in loader:
            yield blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]

    def accuracy(model: Model) -> float:
        return _accuracy(model, graph, x, labels, masks["test"])

    # Blocks are a trainer's own and shares are equal, so that DDP serves as it does with DistDGL.
    model = _model(job, x.shape[1])
    ddp = DistributedDataParallel(model)
    return _train(model, ddp, _Loader(epoch, functional.cross_entropy, lambda _: None, accuracy), job)


def caching_worker(report: Callable[[Any], None], job: Job, partition_json: Path) -> Measured:
    """The library's loader with a cache of a quarter of the worker's own features."""
    return worker(report, job, partition_json, cached=0.25)


def whole_graph(_: Callable[[Any], None], job: Job, partition_json: Path) -> Measured:
    """No loader: every epoch is one step on the whole graph, with gradients summed over workers."""
    _set_allocator(job)
    graph, x, labels, masks = _part(partition_json)
    targets = labels.masked_fill(~masks["train"], UNLABELLED)
    count = masks["train"].sum()
    sar.comm.all_reduce(count, dist.ReduceOp.SUM)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets, reduction="sum") / count

    def accuracy(model: Model) -> float:
        return _accuracy(model, graph, x, labels, masks["test"])

    model = _model(job, x.shape[1])
    sar.sync_params(model)
    return _train(model, model, _Loader(lambda: [(graph, x, targets)], loss, sar.gather_grads, accuracy), job)


def distdgl(job: Job) -> Measured:
    """DistDGL's loader and DDP, as its users write it."""
    without_huge_pages()
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

    def accuracy(model: Model) -> float:
        sar.initialize_comms()
        part: Any = sar.convert_dist_graph(graph)
        return _accuracy(model, part, part.ndata["feat"], part.ndata["label"], part.ndata["test_mask"].bool())

    return _train(model, ddp, _Loader(epoch, functional.cross_entropy, lambda _: None, accuracy), job)


def _set_allocator(job: Job) -> None:
    sar.Config.allocator = job.allocator
    set_allocator()


def _part(partition_json: Path) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
    """This worker's part of the graph, its features, labels and masks."""
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(str(partition_json), sar.rank(), "cpu")
    x, labels = (sar.suffix_key_lookup(data.node_features, key) for key in ("feat", "label"))
    masks = {part: sar.suffix_key_lookup(data.node_features, f"{part}_mask") for part in ("train", "test")}
    return sar.construct_full_graph(data), x, labels, masks


def _accuracy(model: Model, graph: Any, x: Tensor, labels: Tensor, test: Tensor) -> float:
    """Over all workers."""
    right = (model(graph, x).argmax(1) == labels)[test]
    counts = torch.tensor([int(right.sum()), len(right)])
    sar.comm.all_reduce(counts, dist.ReduceOp.SUM)
    return float(counts[0] / counts[1])


def _model(job: Job, num_features: int) -> Model:
    torch.manual_seed(job.seed)
    return Model("SAGE", num_features, job.num_classes)


class _Epoch(NamedTuple):
    """As in `Measured`, of one epoch."""

    seconds: float
    fetching: float
    batches: int
    seeds: int


def _train(model: Model, forward: Callable[[Any, Tensor], Tensor], loader: _Loader, job: Job) -> Measured:
    """The training loop, the same for all; `forward` is the model, or DDP around it."""
    initial = copy.deepcopy(model.state_dict())
    _train_epoch(model, forward, loader, torch.optim.Adam(model.parameters()))  # loads and compiles code
    model.load_state_dict(initial)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate)
    epochs, accuracies = [], []
    memory = PeakMemory()
    resident = 0
    for _ in range(job.epochs):
        epochs.append(_train_epoch(model, forward, loader, optimizer))
        resident = max(resident, memory.baseline + memory.above_baseline())
        if job.evaluate:
            with torch.no_grad():
                accuracies.append(loader.accuracy(model))
    seconds, fetching = [epoch.seconds for epoch in epochs], [epoch.fetching for epoch in epochs]
    return Measured(seconds, fetching, epochs[-1].batches, epochs[-1].seeds, accuracies, resident)


def _train_epoch(
    model: Model, forward: Callable[[Any, Tensor], Tensor], loader: _Loader, optimizer: torch.optim.Optimizer
) -> _Epoch:
    batches = seeds = 0
    fetching = 0.0
    start = mark = time.perf_counter()
    for graphs, x, labels in loader.epoch():
        fetching += time.perf_counter() - mark
        loss = loader.loss(forward(graphs, x), labels)
        optimizer.zero_grad()
        loss.backward()
        loader.gather_gradients(model)
        optimizer.step()
        batches, seeds = batches + 1, seeds + int((labels != UNLABELLED).sum())
        mark = time.perf_counter()
    end = time.perf_counter()
    return _Epoch(end - start, fetching + end - mark, batches, seeds)


def main() -> None:
    """A trainer of DistDGL: the job comes from a file, what it measured goes to another."""
    job_file, folder = map(Path, sys.argv[1:])
    measured = distdgl(Job(**json.loads(job_file.read_text())))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
