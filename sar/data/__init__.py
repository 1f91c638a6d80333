"""Files: the partition directory, loading of a worker's share, and versions of checkpoints; free of DGL."""
