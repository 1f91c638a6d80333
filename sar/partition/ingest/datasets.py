"""Graphs of data sets by name, which are read into memory."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sar.adapters.dgl.datasets import DGL_DATASETS, load_dgl_dataset
from sar.common_tuples import SPLIT, StrPath
from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource


def load_dataset(name: str, folder: StrPath | None = None) -> GraphSource:
    """Load a homogeneous graph with one class per node, by a name known to `dgl.data` (`cora`, `reddit`, ...) or to the
    Open Graph Benchmark (`ogbn-arxiv`, ...).

    It is downloaded at first use, to `folder`, or to the package's own default. `ConfigError` if the name is unknown,
    the download failed, or the graph is of another kind.
    """
    key = name.lower()
    if key.startswith("ogbn-"):
        return _through("ogb", name, lambda: _ogb_graph(key, folder))
    key = key.replace("-", "_")
    if key in DGL_DATASETS:
        return _through("dgl.data", name, lambda: _dgl_graph(key, folder))
    known = ", ".join(sorted(DGL_DATASETS))
    raise ConfigError(f"unknown data set '{name}': it is neither an ogbn- name, nor one of {known}.")


def _through(package: str, name: str, load: Callable[[], GraphSource]) -> GraphSource:
    """Load through a package and turn its errors into one with a remedy."""
    try:
        return load()
    except ImportError as error:
        raise ConfigError(f"data set '{name}' needs the package {package}, which does not import: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"data set '{name}' from {package}: {error}") from error
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"data set '{name}' could not be loaded through {package}: {error}. Without a network, copy the files that "
            "the package downloads into its folder."
        ) from error


def _dgl_graph(name: str, folder: StrPath | None) -> GraphSource:
    arrays = load_dgl_dataset(name, None if folder is None else str(folder))
    src, dst, num_nodes = (arrays.pop(key) for key in ("src", "dst", "num_nodes"))
    fields = {key: values.astype(np.bool_) if key in SPLIT else values for key, values in arrays.items()}
    return GraphSource.homogeneous(src, dst, int(num_nodes), fields)


def _ogb_graph(name: str, folder: StrPath | None) -> GraphSource:
    """A graph of the Open Graph Benchmark (Hu et al., 2020)."""
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
    fields = {"label": np.nan_to_num(labels[:, 0], nan=-1).astype(np.int64)}
    if graph.get("node_feat") is not None:
        fields["feat"] = graph["node_feat"]
    for key, mask in zip(("train", "valid", "test"), SPLIT, strict=True):
        fields[mask] = np.isin(np.arange(num_nodes), split[key])
    src, dst = graph["edge_index"]
    return GraphSource.homogeneous(src, dst, num_nodes, fields)
