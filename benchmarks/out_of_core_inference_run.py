"""The measured script of `benchmarks.out_of_core_inference`: a model's outputs for all nodes, with no gradients.

Given a JSON file of partitions it is `examples/evaluate.py`, on any workers, virtual or not. Given a folder of arrays
it is what the `inference` methods of models do in examples of DGL and PyTorch Geometric: layer after layer, and in each
batch after batch of nodes, it gathers the rows of their in-neighbours out of a mapped file, and writes theirs to one.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch

import sar
from benchmarks.limits import join
from benchmarks.models import MODELS, Model
from benchmarks.out_of_core_training import EPOCH, IMPORTED, load_code
from sar.adapters.dgl.shim import require_dgl
from sar.kernels import load_kernels

FEATURES, OFFSETS, SOURCES = "feat.npy", "indptr.npy", "src.npy"


def evaluate(file: Path, model: Model, out: Path) -> None:
    """Outputs of all nodes on the workers that there are, in the order of the input."""
    data = sar.load_dgl_partition_data(file, sar.rank(), "cpu")
    graph, x, original_ids = sar.construct_full_graph(data), data["feat"], data.node_features["orig_id"]
    del data
    with torch.no_grad():
        sar.to_original_order(model(graph, x), original_ids, out=out)


def gather(folder: Path, model: Model, out: Path, size: int, share: int) -> float:
    """Outputs of all nodes, by batches of `size`; of these one in `share` is computed. Returns seconds for all."""
    dgl = require_dgl()
    rows = np.load(folder / FEATURES, mmap_mode="r")
    indptr, src = (np.load(folder / name, mmap_mode="r") for name in (OFFSETS, SOURCES))
    files, taken = [folder / f"hidden-{index}.npy" for index in range(len(model.layers) - 1)] + [out], 0.0
    for index, (layer, file) in enumerate(zip(model.layers, files, strict=True)):
        to = np.lib.format.open_memmap(file, "w+", np.float32, (len(rows), model.widths[index + 1]))
        began, batches = time.perf_counter(), range(0, len(rows), size)
        for first in batches[::share]:
            last = min(first + size, len(rows))
            begins = torch.from_numpy(indptr[first : last + 1].astype(np.int64))
            own = np.arange(first, last)
            sources, place = np.unique(np.concatenate([own, src[begins[0] : begins[-1]]]), return_inverse=True)
            order = np.argsort(~np.isin(sources, own), kind="stable")  # destinations first, as in a block
            back = torch.from_numpy(np.argsort(order)[place[len(own) :]])
            dst = torch.arange(last - first).repeat_interleave(begins.diff())
            block = dgl.create_block((back, dst), len(sources), last - first)
            x = torch.from_numpy(rows[sources[order]])
            with torch.no_grad():
                to[first:last] = model._activate(layer(block, x).flatten(1), index).numpy()
        taken += (time.perf_counter() - began) * len(batches) / len(batches[::share])
        rows = np.load(file, mmap_mode="r")
    return taken


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--widths", nargs=2, type=int, required=True, help="features and classes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group", type=Path, help="control group to join once all code is loaded")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--share", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    load_kernels()
    if not sar.comm.is_initialized():
        load_code(arguments.model)
        print(IMPORTED, os.getpid(), flush=True)
        if arguments.group is not None:
            join(arguments.group)
    partitioned = arguments.graph.suffix == ".json"
    began = time.perf_counter()
    if partitioned:
        sar.initialize_comms()
    torch.manual_seed(0)
    model = Model(arguments.model, *arguments.widths).eval()
    first = not partitioned or sar.rank() == 0
    if first:
        print(EPOCH, 0, "begins", flush=True)
    if partitioned:
        evaluate(arguments.graph, model, arguments.out)
        taken = time.perf_counter() - began
    else:
        taken = gather(arguments.graph, model, arguments.out, arguments.batch, arguments.share)
    if first:
        print(EPOCH, 0, "took", taken, "loss", 0, "on the device", 0, flush=True)


if __name__ == "__main__":
    main()
