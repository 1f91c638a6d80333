"""What makes distributed graphs, for users: with DGL's layers patched, and a `sampling_graph` that is one of DGL's."""

from sar.adapters.dgl.layers.patch import with_patched_dgl
from sar.adapters.dgl.sampling_graph import make_sampling_graph
from sar.comm import session
from sar.common_tuples import PartitionData
from sar.core.build import build_structure
from sar.core.graph import mfg
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.logging_setup import logger

construct_mfgs = with_patched_dgl(mfg.construct_mfgs)


@with_patched_dgl
def construct_full_graph(partition_data: PartitionData) -> GraphShardManager:
    """Make the distributed graph of a partitioned graph; called by all workers together.

    Calls `patch_dgl` where DGL is imported, unless `Config.patch_dgl` is False.

    Args:
        partition_data: this worker's partition, from `load_dgl_partition_data` or made in memory.

    Returns:
        The graph, with the partition's edge features in `edata`. Node features stay in `partition_data`.

    Raises:
        PartitionError: where the data contradicts itself or the number of workers.
        CommunicationError: where another worker raised, or holds another graph.
    """
    logger.info("making the graph of this worker's partition")
    structure, features = build_structure(partition_data, session.current_group(), make_sampling_graph)
    logger.info(
        "the graph is made: %d nodes, %d edges into them, %d nodes read from others",
        sum(structure.dst.counts.values()),
        sum(relation.num_edges for relation in structure.relations),
        sum(len(halo) for relation in structure.relations for halo in relation.halos),
    )
    return make_graph(structure, features, partition_data.partition_book)
