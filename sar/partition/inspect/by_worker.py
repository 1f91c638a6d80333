"""Counts what each of any number of workers of a partition directory owns and reads, for `sar plan`."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sar.common_tuples import EID, SPLIT, StrPath
from sar.data.part_files import DST, SRC, FeatureFiles, PartFile, types_of
from sar.data.partition_json import graph_path, read_partition_json
from sar.data.regroup import WorkerShare
from sar.errors import ConfigError
from sar.partition.inspect.inspection import one_thread
from sar.tensors.ids import distinct, pieces

Counts = NDArray[np.int64]


class WorkerCounts(NamedTuple):
    """The nodes of one of W workers, and the sources of the edges into them; R edge types."""

    nodes: dict[str, int]  # by type
    split: dict[str, int]  # nodes that train_mask, val_mask and test_mask choose, as far as there are such masks
    edges: Counts  # (R, W) edges by the worker that owns their source
    rows: Counts  # (R, W) distinct nodes of each other worker that these come from


def count_by_worker(path: StrPath, workers: int | None = None) -> list[WorkerCounts]:
    """The counts of so many workers, or of one for each part, as `sar.load_dgl_partition_data` deals out the parts.

    Holds one part's `graph.dgl` at a time, and the IDs of the nodes that one worker reads. The directory is one that
    `inspect_directory` found sound. `ConfigError` without workers.
    """
    spec = read_partition_json(path)
    workers = spec.num_parts if workers is None else workers
    if workers < 1:
        raise ConfigError(f"{workers} workers were asked for; expected at least 1.")
    graph_of = lru_cache(maxsize=1)(lambda part: PartFile(graph_path(spec, part)).read())  # one's workers come in turn
    num_types, num_nodes = len(spec.edge_types), max(spec.partition_ranges[-1][1], 1)
    counts = []
    with one_thread():
        shares = WorkerShare.all(spec, workers)
        ends = torch.tensor([share.end for share in shares], device="cpu")
        for worker, share in enumerate(shares):
            edges = np.zeros((num_types, workers), np.int64)
            read = [torch.empty(0, dtype=torch.int64, device="cpu")]  # pairs of edge type and node, as one number
            for graph in map(graph_of, share.parts):
                for chunk in pieces(len(graph.edges[EID])):
                    src, dst, ids = (graph.edges[key][chunk].long() for key in (SRC, DST, EID))
                    reader = graph.node_id[dst]
                    own = graph.is_inner[dst] & (reader >= share.start) & (reader < share.end)
                    kind, source = types_of(ids[own], spec.edge_ranges).long(), graph.node_id[src[own]]
                    owner = torch.searchsorted(ends, source, right=True)
                    np.add.at(edges, (kind.numpy(), owner.numpy()), 1)
                    others = owner != worker
                    read.append(distinct((kind * num_nodes + source)[others]))
            pairs = distinct(torch.cat(read))
            rows = np.zeros_like(edges)
            owner = torch.searchsorted(ends, pairs % num_nodes, right=True)
            np.add.at(rows, ((pairs // num_nodes).numpy(), owner.numpy()), 1)
            own_rows = [share.rows(spec.node_ranges, kind) for kind in range(len(spec.node_types))]
            nodes = [sum(cut.stop - cut.start for cut in of_type.values()) for of_type in own_rows]
            split: dict[str, int] = {}
            for part in share.parts:
                for mask in (one for one in FeatureFiles(spec, part, "nodes").features() if one.name in SPLIT):
                    chosen = int(np.count_nonzero(mask.stored[own_rows[mask.type_id][part]]))
                    split[mask.name] = split.get(mask.name, 0) + chosen
            counts.append(WorkerCounts(dict(zip(spec.node_types, nodes, strict=True)), split, edges, rows))
    return counts
