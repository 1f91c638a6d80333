"""Graphs of data sets by name, which are read into memory."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from sar.adapters.dgl.datasets import DGL_DATASETS, load_dgl_dataset
from sar.common_tuples import StrPath
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource
from sar.partition.npz_files import graph_of_arrays, read_npz


def load_dataset(name: str, folder: StrPath | None = None, split: int | None = None) -> GraphSource:
    """Load a graph with one class per node; only an `.npz` file may hold a heterogeneous one.

    Args:
        name: an `.npz` file; or `cora` for `cora.npz` in `folder`; or, if there is no such file, a name known to
            `dgl.data` (`cora`, `reddit`, ...) or to the Open Graph Benchmark (`ogbn-arxiv`, ...), which are downloaded
            at first use.
        folder: folder of `.npz` files and of downloads; None for the packages' own defaults.

    `ConfigError` if the name is unknown, the download failed, or the graph is of another kind.
    """
    if name.endswith(".npz"):
        return read_npz(name, split)
    if folder is not None and (file := Path(folder) / f"{name}.npz").exists():
        return read_npz(file, split)
    key = name.lower()
    if key.startswith("ogbn-"):
        return _through("ogb", name, lambda: _ogb_arrays(key, folder), split)
    key = key.replace("-", "_")
    if key in DGL_DATASETS:
        return _through("dgl.data", name, lambda: load_dgl_dataset(key, None if folder is None else str(folder)), split)
    where = f"no {name}.npz in '{folder}', and " if folder is not None else ""
    raise ConfigError(
        f"unknown data set '{name}': {where}neither a path that ends in .npz, nor an ogbn- name, nor one of "
        f"{', '.join(sorted(DGL_DATASETS))}."
    )


def _through(package: str, name: str, load: Callable[[], Mapping[str, Array]], split: int | None) -> GraphSource:
    """Load through a package and turn its errors into one with a remedy."""
    try:
        return graph_of_arrays(load(), split)
    except ImportError as error:
        raise ConfigError(f"data set '{name}' needs the package {package}, which does not import: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"data set '{name}' from {package}: {error}") from error
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"data set '{name}' could not be loaded through {package}: {error}. Without a network, name a folder that "
            f"holds {name}.npz, or an .npz file itself."
        ) from error


def _ogb_arrays(name: str, folder: StrPath | None) -> Mapping[str, Array]:
    """A graph of the Open Graph Benchmark (Hu et al., 2020), as the arrays of `graph_of_arrays`."""
    from ogb.nodeproppred import NodePropPredDataset

    root = Path("dataset" if folder is None else folder)
    cache = root / name.replace("-", "_") / "processed" / "data_processed"
    if cache.exists():
        raise ConfigError(f"'{cache}' is a pickle, which is not read; delete it, and ogb reads its raw files again.")
    dataset = NodePropPredDataset(name=name, root=str(root))
    cache.unlink(missing_ok=True)  # just written, and of no use: torch.load does not read it back
    graph, labels = dataset[0]
    split = dataset.get_idx_split()
    if "edge_index" not in graph:
        raise ConfigError("the graph is heterogeneous; expected one node type and one edge type.")
    if labels.shape[1] != 1:
        raise ConfigError(f"nodes have {labels.shape[1]} labels each; expected one class.")
    num_nodes = int(graph["num_nodes"])
    arrays = {"src": graph["edge_index"][0], "dst": graph["edge_index"][1], "num_nodes": np.int64(num_nodes)}
    if graph.get("node_feat") is not None:
        arrays["feat"] = graph["node_feat"]
    arrays["label"] = np.nan_to_num(labels[:, 0], nan=-1)
    for key, ours in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        arrays[ours] = np.isin(np.arange(num_nodes), split[key])
    return arrays
