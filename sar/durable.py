"""Files that outlast a crash of the machine."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A draft beside a file, which takes its place once written: nobody sees half of it. Gone after an error."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as draft:
        try:
            yield draft.file
            draft.close()
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise
