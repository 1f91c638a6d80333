"""Removed names of sar and their replacements, for the errors of scripts that still use them."""

_WHOLE_GRAPH = "It computes the whole graph; a loader with fan-out -1 computes a few nodes, see docs/howto/infer.md."
_SUBGRAPHS = "PyTorch Geometric has {} for graphs of one machine; sar.DistNeighborSampler samples from all workers."
_COMMENTS = "Comments before the first row begin with # or %."
_EMPTY = "Leave out the edge type that has no edges."
_RAW = "Save raw integers as .npy: numpy.save('edges.npy', numpy.fromfile(FILE, 'int32').reshape(-1, 2))."
_OUTSIDE = "Move the files into the directory, or name them: NTYPE:RELATION:NTYPE=FILE, --node-feature NAME=FILE."
_MASKS = "Save this mask as a separate array, (N,)."
REMOVED = {
    "sar.ClusterGCNSampler": _SUBGRAPHS.format("ClusterLoader"),
    "sar.SAINTSampler": _SUBGRAPHS.format("GraphSAINTSampler"),
    "sar chunk --comment": _COMMENTS,
    "sar chunk --mask-column": _MASKS,
    "sar partition --comment": _COMMENTS,
    "sar partition --mask-column": _MASKS,
    "sar chunk --allow-empty": _EMPTY,
    "sar chunk --dtype": _RAW,
    "sar partition --allow-empty": _EMPTY,
    "sar partition --dtype": _RAW,
    "sar partition --overwrite": "Remove the directory first.",
    "sar chunk --allow-outside": _OUTSIDE,
    "sar partition --allow-outside": _OUTSIDE,
    "sar examples": "The scripts are in the folder examples/ of the repository.",
    "sar infer --allow-outside": "Put the files of the directory into it.",
    "sar infer --check": _WHOLE_GRAPH,
    "sar infer --hops": _WHOLE_GRAPH,
    "sar inspect --picture": "`sar inspect --json` prints the numbers, as traffic.",
    "sar inspect --allow-outside": "Copy the files below the directory; DGL and sar write them there.",
    "sar inspect --values": "sar.load_dgl_partition_data returns the features: features[name].isnan().any().",
    "sar inspect --workers": "`sar plan` says what the worker of each partition holds and sends.",
    "sar plan --workers": "Partition the graph into this number of partitions, and plan for these.",
}
"""Public names of `sar`, commands, and options of commands."""


def advice(name: str) -> str | None:
    """A sentence about the replacement of a removed name; None if sar never had it."""
    return None if name not in REMOVED else f"{name} was removed. {REMOVED[name]}"
