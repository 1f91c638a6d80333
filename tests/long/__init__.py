"""Long runs, all slow: what grows over thousands of steps, many workers and partitions, and many edges."""
