"""Worker processes of this machine and their memory, for commands, tests and benchmarks."""
