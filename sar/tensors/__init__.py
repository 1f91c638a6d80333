"""Helpers for tensors: IDs, views, hashes, files in place of memory."""
