"""Benchmarks of time, memory and traffic. `make bench` runs the main one."""
