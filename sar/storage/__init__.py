"""Files: the partition directory, what each worker reads of it, and versions of checkpoints; free of DGL."""
