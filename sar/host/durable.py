"""Files that outlast a crash of the machine."""

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
    """Give a finished file, or a directory of synced files, its name: after a crash the old one is there or the new.

    An earlier file, or an empty directory, of that name is replaced.
    """
    sync(draft)
    draft.replace(path)
    sync(path.parent)
