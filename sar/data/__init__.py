"""Files: partition directories, loading of a worker's share, and versions of checkpoints. Does not import DGL."""
