"""The graph object: relations, fields, queries, and graphs derived from graphs."""
