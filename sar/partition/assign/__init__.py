"""Partition methods: from a graph source to the part of each node."""
