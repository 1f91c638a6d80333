"""The measured script of `benchmarks.out_of_core`: trains or evaluates a model on partitions, on any workers.

It says when it has imported everything and when each epoch begins and ends, for the parent to note the memory.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.nn import functional

import sar
from benchmarks.models import MODELS, Model
from sar.adapters.dgl.shim import require_dgl
from sar.kernels import load_kernels

IMPORTED, EPOCH = "imported", "epoch"


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("partition_json")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--group", type=Path, help="control group to join once all code is loaded")
    parser.add_argument("--out", type=Path, help="write the outputs of all nodes here, instead of training")
    arguments = parser.parse_args()
    if not sar.comm.is_initialized():  # once a process
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _load_code(arguments.model)
        print(IMPORTED, os.getpid(), flush=True)
        if arguments.group is not None:
            (arguments.group / "cgroup.procs").write_text(str(os.getpid()))
    began = time.perf_counter()
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    fields = ("feat", "label", "train_mask", "orig_id")
    x, labels, train, original = (sar.suffix_key_lookup(data.node_features, name) for name in fields)
    del data
    torch.manual_seed(0)
    model = Model(arguments.model, x.shape[1], arguments.classes)
    sar.sync_params(model)
    if arguments.out is not None:
        sar.print(EPOCH, 0, "begins")
        with torch.no_grad():
            sar.to_original_order(model.eval()(graph, x), original, out=arguments.out)
        sar.print(EPOCH, 0, "took", time.perf_counter() - began, "loss", 0.0)
        return
    n_train = sar.all_sum(train.sum().item())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(arguments.epochs):
        sar.all_sum(0)
        sar.print(EPOCH, epoch, "begins")
        began = time.perf_counter()
        loss = functional.cross_entropy(model(graph, x)[train], labels[train], reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        total = sar.all_sum(loss.item())
        sar.print(EPOCH, epoch, "took", time.perf_counter() - began, "loss", total)


def _load_code(model_name: str) -> None:
    """Train once on one machine, so that limits are above all code that is loaded on first use."""
    load_kernels()
    dgl = require_dgl()
    model = Model(model_name, 4, 2)
    model(dgl.add_self_loop(dgl.rand_graph(8, 16)), torch.ones(8, 4)).sum().backward()
    torch.optim.Adam(model.parameters()).step()


if __name__ == "__main__":
    main()
