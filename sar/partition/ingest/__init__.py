"""Readers of graphs that may be larger than memory: one file for each format, and `open_graph` for all of them."""

from sar.partition.ingest.open import from_memory, open_graph

__all__ = ["from_memory", "open_graph"]
