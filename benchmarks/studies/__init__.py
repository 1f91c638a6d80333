"""Studies that answered a question once; each writes its section of docs/benchmarks.md."""
