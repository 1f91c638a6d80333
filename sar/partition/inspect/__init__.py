"""What is in a partition directory, and whether it is sound."""
