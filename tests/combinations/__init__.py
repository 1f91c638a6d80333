"""Features as users combine them: random calls on random graphs, with one machine beside them."""
