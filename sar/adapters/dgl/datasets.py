"""Node classification graphs of `dgl.data`."""

from typing import Any

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


def load_dgl_dataset(name: str, folder: str | None = None) -> Any:
    """Load a graph of `DGL_DATASETS`. `dgl.data` downloads it at first use, to `folder` or its default folder."""
    require_dgl()
    import dgl.data

    # KarateClubDataset is built in memory, so it takes no folder.
    options = {} if name == "karate" else {"raw_dir": folder, "verbose": False}
    return getattr(dgl.data, DGL_DATASETS[name])(**options)[0]
