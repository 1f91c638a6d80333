"""Offline partitioning: from files or a graph in memory to partition directories."""
