"""The distributed graph of a whole partitioned graph, whose `sampling_graph` is one of DGL's."""

from sar.adapters.dgl.sampling_graph import make_sampling_graph
from sar.comm import session
from sar.common_tuples import PartitionData
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.relation import build_structure


def construct_full_graph(partition_data: PartitionData) -> GraphShardManager:
    """Make the distributed graph of a partitioned graph; called by all workers together.

    Args:
        partition_data: this worker's partition, from `load_dgl_partition_data` or made in memory.

    Returns:
        The graph, with the partition's edge features in `edata`. Node features stay in `partition_data`.

    Raises:
        PartitionError: where the data contradicts itself or the number of workers.
        CommunicationError: where another worker raised, or holds another graph.
    """
    structure, features = build_structure(partition_data, session.current_group(), make_sampling_graph)
    return make_graph(structure, features, partition_data.partition_book)
