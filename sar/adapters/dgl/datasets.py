"""Node classification graphs of `dgl.data`, as plain arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sar.adapters.dgl.shim import require_dgl

DGL_DATASETS = {
    "amazon_computers": "AmazonCoBuyComputerDataset",
    "amazon_photo": "AmazonCoBuyPhotoDataset",
    "citeseer": "CiteseerGraphDataset",
    "coauthor_cs": "CoauthorCSDataset",
    "coauthor_physics": "CoauthorPhysicsDataset",
    "cora": "CoraGraphDataset",
    "flickr": "FlickrDataset",
    "karate": "KarateClubDataset",
    "pubmed": "PubmedGraphDataset",
    "reddit": "RedditDataset",
}
"""Homogeneous graphs with one class per node, and their classes in `dgl.data`."""


def load_dgl_dataset(name: str, folder: str | None = None) -> dict[str, NDArray[Any]]:
    """A graph of `DGL_DATASETS`: `src`, `dst`, `num_nodes`, and `feat`, `label` and masks if it has them.

    `dgl.data` downloads it at first use, to `folder`, or to its own default.
    """
    require_dgl()
    import dgl.data

    # KarateClubDataset is built in memory, so it takes no folder.
    options = {} if name == "karate" else {"raw_dir": folder, "verbose": False}
    graph = getattr(dgl.data, DGL_DATASETS[name])(**options)[0]
    src, dst = graph.edges(order="eid")
    arrays = {"src": src.numpy(), "dst": dst.numpy(), "num_nodes": np.int64(graph.num_nodes())}
    fields = ("feat", "label", "train_mask", "val_mask", "test_mask")
    return arrays | {key: graph.ndata[key].numpy() for key in fields if key in graph.ndata}
