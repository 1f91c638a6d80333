"""Reading what DGL writes: partition directories, tensor files, whole graphs, running DistGraphs."""
