"""Message passing: built-in functions, Python functions, attention, and sums against the edges."""
