"""Writing what DGL reads: the bytes of its tensor and graph files, and its partition directories."""
