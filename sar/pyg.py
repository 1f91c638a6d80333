"""`sar.pyg`: PyTorch Geometric's layers, normalisation and pooling on graphs that span all workers."""

import torch
from torch_geometric.data import Data, HeteroData

from sar.adapters.dgl.graphs import construct_full_graph
from sar.adapters.dgl.load import load_dgl_partition_data
from sar.adapters.pyg.batch_vector import batch_vector
from sar.adapters.pyg.graph import edge_index, make_data
from sar.adapters.pyg.norms import global_add_pool, global_max_pool, global_mean_pool
from sar.comm.session import rank
from sar.common_tuples import StrPath

__all__ = [
    "batch_vector",
    "edge_index",
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "load_partition",
]


def load_partition(partition_json_file: StrPath, device: torch.device | str = "cpu") -> Data | HeteroData:
    """Load this worker's part of a partitioned graph for PyTorch Geometric. All workers must call this together.

    Args:
        partition_json_file: the partition directory, or its JSON file.
        device: device of all tensors. Default "cpu".

    Returns:
        This worker's nodes and in-edges. Features keep their names, except that `feat` is `x`, `label` is `y`, and
        `_TYPE` is `node_type` and `edge_type`. With `edge_index`, layers read the nodes of all workers. Rows are this
        worker's nodes only; `orig_id` holds their IDs in the input graph, if known. `batch` is a distributed batch
        vector, of one graph unless the directory has a `batch` feature. `graph` is the distributed graph, for sampling.

    Raises:
        PartitionError, CommunicationError: as in `sar.load_dgl_partition_data` and `sar.construct_full_graph`.
    """
    partition = load_dgl_partition_data(partition_json_file, rank(), device)
    return make_data(partition.node_features, construct_full_graph(partition))
