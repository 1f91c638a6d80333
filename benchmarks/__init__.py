"""Measurements of sar against single-process DGL: time, memory and bytes. `make bench` runs the main one."""
