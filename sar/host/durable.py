"""Writes files that survive a crash of the machine."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(draft: Path, path: Path) -> None:
    """Rename a finished file, or a directory of synced files, atomically: after a crash the old or the new one exists.

    Replaces an earlier file, or an empty directory, of this name.
    """
    sync(draft)
    draft.replace(path)
    sync(path.parent)
