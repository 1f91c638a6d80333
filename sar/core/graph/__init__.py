"""The graph object: relations, fields, queries, and graphs made of graphs."""
