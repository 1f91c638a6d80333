"""From a graph source and an assignment to a partition directory."""
