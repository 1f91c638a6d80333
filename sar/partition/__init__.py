"""Offline: from files or a graph in memory to partition directories, in parts that any method assigns."""
