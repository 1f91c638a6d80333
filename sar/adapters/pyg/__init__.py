"""PyTorch Geometric: its layers on graphs that span all workers. Nothing else in sar imports its package."""
