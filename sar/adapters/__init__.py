"""Adapters to graph libraries: the only modules of sar that import one."""
