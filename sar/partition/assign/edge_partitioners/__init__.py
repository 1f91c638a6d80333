"""Methods that assign edges to parts; votes of its edges give each node a part."""
