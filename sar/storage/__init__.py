"""The partition directory: arrays in files, the JSON file at its head, checksums; free of DGL."""
