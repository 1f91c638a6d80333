"""Writes a graph source and an assignment as a partition directory."""
