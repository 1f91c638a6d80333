"""Loads graphs of named data sets into memory."""

import pickle
from dataclasses import replace

import numpy as np

from sar.adapters.dgl.datasets import DGL_DATASETS, load_dgl_dataset
from sar.common_tuples import SPLIT, StrPath
from sar.errors import ConfigError
from sar.partition.graph_source import ONLY_TYPE, GraphSource
from sar.partition.ingest.objects import from_object


def load_dataset(name: str, folder: StrPath | None = None) -> GraphSource:
    """Load a homogeneous graph with one class per node, by a name known to `dgl.data` (`cora`, `reddit`, ...).

    The first use downloads it to `folder`, by default to the folder of the package. `ConfigError` if the name is
    unknown, the download failed, or the graph is of another kind.
    """
    key = name.lower().replace("-", "_")
    if key not in DGL_DATASETS:
        raise ConfigError(f"unknown data set '{name}'; expected one of {', '.join(sorted(DGL_DATASETS))}.")
    try:
        graph = from_object(load_dgl_dataset(key, None if folder is None else str(folder)))
    except ImportError as error:
        raise ConfigError(f"data set '{name}' needs dgl.data, which does not import: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"data set '{name}' from dgl.data: {error}") from error
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"data set '{name}' could not be loaded through dgl.data: {error}. Without a network, copy the files that "
            "the package downloads into its folder."
        ) from error
    (fields,) = graph.node_data.values()
    kept = {name: fields[name] for name in ("feat", "label") if name in fields}
    masks = {name: fields[name][:].astype(np.bool_) for name in SPLIT if name in fields}
    return replace(graph, node_data={ONLY_TYPE[0]: kept | masks}, edge_data={})
