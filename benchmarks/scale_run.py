"""The script that `benchmarks.scale` measures: training on partitions, under `sar launch`, as users write it.

With `--whole` it trains on the whole graph in one process, without sar. `sage`, `gat` and `gcn` make the models for
`sar infer`. It prints lines of JSON: seconds to load, and what each epoch takes.
"""

import argparse
import json
import os
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import sar  # isort: skip  (before dgl)
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv

from benchmarks.control_group import bytes_moved
from benchmarks.graphs import NUM_CLASSES, GeneratedSize
from benchmarks.models import Model
from sar.adapters.dgl.models import dgl_graph
from sar.train.counted_graph import GraphInfo

FEATURES, CLASSES = GeneratedSize.features, NUM_CLASSES


class Gcn(nn.Module):
    """Three layers of PyTorch Geometric with ReLU between them, of hidden width 256."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GCNConv(*ends) for ends in pairwise((FEATURES, 256, 256, CLASSES)))

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(functional.relu(x) if index else x, edge_index)
        return x


def sage(info: GraphInfo | None = None) -> nn.Module:
    """Layers of DGL of hidden width 256."""
    return Model("SAGE", FEATURES, CLASSES)


def gat(info: GraphInfo | None = None) -> nn.Module:
    """Layers of DGL with 4 heads of width 32."""
    return Model("GAT", FEATURES, CLASSES)


def gcn(info: GraphInfo | None = None) -> nn.Module:
    """Layers of PyTorch Geometric."""
    return Gcn()


MAKERS = {"SAGE": sage, "GAT": gat, "GCN": gcn}


def main() -> None:
    """Load, train and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="partitions, or with --whole the files of the graph")
    parser.add_argument("--model", choices=MAKERS, default="SAGE")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--weights", type=Path, help="save them here")
    parser.add_argument("--whole", action="store_true", help="train on the whole graph, without sar")
    arguments = parser.parse_args()
    began, together = time.perf_counter(), not arguments.whole
    if together:
        sar.initialize_comms()
    inputs, labels, train = (_partition if together else _whole)(arguments.directory, arguments.model)
    torch.manual_seed(0)
    model = MAKERS[arguments.model]()
    if together:
        sar.sync_params(model)
    say = sar.print if together else print
    num_train = sar.all_sum(int(train.sum())) if together else int(train.sum())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    say(json.dumps({"loaded": time.perf_counter() - began}))
    for epoch in range(arguments.epochs):
        began, before = time.perf_counter(), _counters()
        loss = functional.cross_entropy(model(*inputs)[train], labels[train], reduction="sum") / num_train
        forward = time.perf_counter() - began
        optimizer.zero_grad()
        loss.backward()
        if together:
            sar.gather_grads(model)
        optimizer.step()
        total = sar.all_sum(loss.item()) if together else loss.item()
        user, system, read, written = (after - then for then, after in zip(before, _counters(), strict=True))
        took = {"epoch": epoch, "seconds": time.perf_counter() - began, "forward": forward, "loss": total}
        say(json.dumps(took | {"user": user, "system": system, "read": read, "written": written}), flush=True)
    if arguments.weights is not None:
        sar.save_model(str(arguments.weights), model)


def _partition(directory: Path, model: str) -> tuple[tuple[Any, Any], Tensor, Tensor]:
    """A worker's inputs of the model, labels and mask."""
    if model == "GCN":
        data: Any = sar.pyg.load_partition(str(directory))
        return (data.x, data.edge_index), data.y, data.train_mask.bool()
    part: Any = sar.load_dgl_partition_data(str(directory), sar.rank(), "cpu")
    return (sar.construct_full_graph(part), part["feat"]), part["label"], part["train_mask"].bool()


def _whole(folder: Path, model: str) -> tuple[tuple[Any, Any], Tensor, Tensor]:
    """The same of the whole graph, for DGL or PyTorch Geometric."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    src, dst = (torch.from_numpy(ends) for ends in np.ascontiguousarray(np.load(folder / "edges.npy", "r").T))
    x, labels = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("feat", "label"))
    inputs = (x, torch.stack([src, dst]).long()) if model == "GCN" else (dgl_graph(src, dst, len(x)), x)
    return inputs, labels, torch.rand(len(x), generator=torch.Generator().manual_seed(1)) < 0.6


def _counters() -> tuple[float, float, int, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime, *bytes_moved()


if __name__ == "__main__":
    main()
