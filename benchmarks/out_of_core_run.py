"""The measured script of `benchmarks.out_of_core`: trains a model on partitions.

It reports the end of imports, and each epoch's begin and end, for the parent to record the memory.
"""

import argparse
import os
import time

import torch
from torch.nn import functional

import sar
from benchmarks.models import MODELS, Model
from sar.adapters.dgl.shim import require_dgl
from sar.kernels import load_kernels

IMPORTED, EPOCH = "imported", "epoch"


def main() -> None:
    """Run the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("partition_json")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    if not sar.comm.is_initialized():  # once per process
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _load_code(arguments.model)
        print(IMPORTED, os.getpid(), flush=True)
    sar.initialize_comms()
    data = sar.load_dgl_partition_data(arguments.partition_json, sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    fields = ("feat", "label", "train_mask")
    x, labels, train = (sar.suffix_key_lookup(data.node_features, name) for name in fields)
    del data
    torch.manual_seed(0)
    model = Model(arguments.model, x.shape[1], arguments.classes)
    sar.sync_params(model)
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
    """Train once on one machine, so that all code is loaded before a limit is set."""
    load_kernels()
    dgl = require_dgl()
    model = Model(model_name, 4, 2)
    model(dgl.add_self_loop(dgl.rand_graph(8, 16)), torch.ones(8, 4)).sum().backward()
    torch.optim.Adam(model.parameters()).step()


if __name__ == "__main__":
    main()
