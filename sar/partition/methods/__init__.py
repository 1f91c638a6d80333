"""Methods that assign nodes to parts."""
