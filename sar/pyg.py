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
    """This worker's part of a partitioned graph, for layers of PyTorch Geometric; called by all workers together.

    Args:
        partition_json_file: the JSON file of a partition directory, or the directory.
        device: of all tensors. Default "cpu".

    Returns:
        Its nodes and the edges into them, each field under its name (`feat` as `x`, `label` as `y`, `_TYPE` as
        `node_type` and `edge_type`), and `edge_index`, with which layers reach the nodes of all workers. Rows of nodes
        are this worker's only; `orig_id` are their IDs in the graph that was partitioned, if the directory has them.
        `batch` is a batch vector of graphs across workers, one graph if the directory has none, and `graph` the
        distributed graph, to sample from.

    Raises:
        PartitionError, CommunicationError: as `sar.load_dgl_partition_data` and `sar.construct_full_graph`.
    """
    partition = load_dgl_partition_data(partition_json_file, rank(), device)
    return make_data(partition.node_features, construct_full_graph(partition))
