"""From a graph source to an assignment: which part each node belongs to."""
