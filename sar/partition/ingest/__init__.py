"""Readers of graphs that may be larger than memory: one file for each format, and `open.py` for all of them."""
