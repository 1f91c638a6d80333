"""The measured script of `benchmarks.out_of_core`: trains a model on partitions, on any workers, virtual or not.

It says when it has imported everything and when each epoch begins and ends, for the parent to note the memory.
"""

import argparse
import os
import resource
import threading
import time
from pathlib import Path

import torch
from torch.nn import functional

import sar
from benchmarks.limits import join
from benchmarks.models import MODELS, Model
from sar.adapters.dgl.shim import require_dgl
from sar.kernels import load_kernels
from sar.outofcore.residency import Residency

IMPORTED, EPOCH = "imported", "epoch"
STACK = 2**20
"""Bytes of a thread's stack, where memory is limited by address: 8 MB for each would count, though never touched."""

_leave = Residency.leave
_files: set[int] = set()


def leave_coldly(residency: Residency) -> None:
    """Leave memory, and have the system forget the files: what comes back is read from the disk."""
    _leave(residency)
    _files.add(residency.file.fd)
    os.fdatasync(residency.file.fd)
    began = time.perf_counter()
    for file in _files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    seconds = forgetting() + time.perf_counter() - began
    setattr(leave_coldly, "seconds", seconds)  # noqa: B010  to type checkers, a function has no attributes


def load_code(model_name: str) -> None:
    """Train once on one machine, so that limits are above all code that is loaded on first use."""
    dgl = require_dgl()
    model = Model(model_name, 4, 2)
    model(dgl.add_self_loop(dgl.rand_graph(8, 16)), torch.ones(8, 4)).sum().backward()
    torch.optim.Adam(model.parameters()).step()


def forgetting() -> float:
    """Seconds it has taken to forget, which no training takes; kept at the method, as every worker is a module."""
    return getattr(Residency.leave, "seconds", 0.0)


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("partition_json")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, metavar="MB", help="RLIMIT_DATA beside code")
    parser.add_argument("--group", type=Path, help="control group to join once all code is loaded")
    parser.add_argument("--cold", action="store_true", help="drop the page cache of spilled tensors at every turn")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    load_kernels()
    if not sar.comm.is_initialized():
        load_code(arguments.model)
        print(IMPORTED, os.getpid(), flush=True)
        if arguments.limit is not None:
            limit = _data() + arguments.limit * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            threading.stack_size(STACK)
        if arguments.group is not None:
            join(arguments.group)
        if arguments.cold:
            setattr(Residency, "leave", leave_coldly)  # noqa: B010  a method, to type checkers
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    x, labels, train = (sar.suffix_key_lookup(data.node_features, key) for key in ("feat", "label", "train_mask"))
    del data
    n_train = sar.all_sum(train.sum().item())
    torch.manual_seed(0)
    model = Model(arguments.model, x.shape[1], arguments.classes)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(arguments.epochs):
        sar.all_sum(0)
        if sar.rank() == 0:
            print(EPOCH, epoch, "begins", flush=True)
        began = time.perf_counter() - forgetting()
        loss = functional.cross_entropy(model(graph, x)[train], labels[train], reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        total = sar.all_sum(loss.item())
        if sar.rank() == 0:
            seconds = time.perf_counter() - forgetting() - began
            print(EPOCH, epoch, "took", seconds, "loss", total, flush=True)


def _data() -> int:
    """Bytes that count for RLIMIT_DATA."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


if __name__ == "__main__":
    main()
