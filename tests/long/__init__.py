"""Long runs, all slow: what grows over thousands of steps."""
