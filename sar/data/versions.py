"""Versioned saves of all workers to one folder, each complete or absent, with rows of nodes.

[Note: versions]
A version is a directory with one file per worker, one shared file, and a manifest. Workers write to a draft in the same
folder and wait until their files are on disk. Then worker 0 adds the manifest, with sizes and checksums, renames the
directory and only then removes older versions. So a kill at any moment leaves the last version, and at most a
draft, which the next save removes. A version is only read if all of its files match the manifest. All workers must
share the folder, for example over NFS, and only one job at a time may write to it.
"""

import json
import pickle
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sar.comm import session
from sar.common_tuples import StrPath
from sar.data.checksums import file_sum
from sar.errors import CheckpointError
from sar.host.durable import put_in_place, sync
from sar.logging_setup import logger
from sar.tensors.ids import find_sorted

MANIFEST: Final = "manifest.json"
SHARED: Final = "shared.pt"
LATEST: Final = "latest"  # has the name of the newest version, for people


@dataclass(frozen=True)
class Version:
    """A saved version, as its manifest describes it."""

    path: Path = field(compare=False)  # folder of the version
    number: int  # counts the saves to its folder
    step: int  # of training
    world_size: int  # of the workers that saved it
    files: dict[str, tuple[int, int]]  # by name, size in bytes and sum

    def read(self, rank: int | None = None) -> Any:
        """The content that a worker saved, or with None the shared content. Tensors are read on first use.

        Nothing in the file is executed.
        """
        path = self.path / (SHARED if rank is None else part_name(rank))
        try:
            return _load(path, mapped=rank is not None)
        except Exception as error:  # unpickler and archive reader raise many exceptions
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    def fault(self, rank: int, world_size: int) -> str | None:
        """The first damage in the files that worker `rank` of `world_size` checks, or None. Workers share the files."""
        for name in sorted(self.files)[rank::world_size]:
            try:
                actual = _size_and_sum(self.path / name)
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
            if actual != tuple(self.files[name]):
                return f"{name} has {actual[0]} bytes with the sum {actual[1]}; expected {self.files[name]}"
        return None


def part_name(rank: int) -> str:
    """The file of a worker."""
    return f"worker-{rank}.pt"


def write_version(folder: StrPath, step: int, part: Any, shared: Any, keep: int) -> None:
    """Write a version, and keep the newest `keep` versions. A collective call.

    Each worker saves its `part`, and worker 0 also `shared`: tensors, numbers, strings, and lists, tuples and
    dictionaries of these.

    Raises:
        CheckpointError: if a file cannot be written or read back; earlier versions are unchanged.
    """
    group, folder = session.current_group(), Path(folder)
    with group.guard():
        call = f"saving step {step}, keeping {keep}"
        group.agree(call)
        draft = folder / f".draft-{group.new_name(call)}"
        try:
            with _writing(folder):
                if group.rank == 0:
                    folder.mkdir(parents=True, exist_ok=True)
                    sync(folder.parent)
                    for unfinished in folder.glob(".draft-*"):
                        shutil.rmtree(unfinished, ignore_errors=True)
                    draft.mkdir()
            group.agree(f"{call}: the draft is there")
            files, own_file, failure = {}, (0, 0), None
            try:
                with _writing(folder):
                    if group.rank == 0:
                        files[SHARED] = _write(draft / SHARED, shared)
                    own_file = _write(draft / part_name(group.rank), part)
                    sync(draft)
            except CheckpointError as error:
                failure = error
            # No worker raises, and removes the draft, while another still writes to it.
            for rank, (size, crc) in enumerate(group.gather_numbers(own_file, f"{call}: all have written")):
                files[part_name(rank)] = (size, crc)
            if failure is not None:
                raise failure
            group.agree(f"{call}: all are written")
            if group.rank == 0:
                with _writing(folder):
                    _put_in_place(folder, draft, step, group.world_size, files)
                for old in _versions(folder)[keep:]:
                    _remove(old.path)
            group.agree(f"{call}: the version is in place")
        except BaseException:
            # Other workers may be past this, so only worker 0 uses the draft.
            if group.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise


def write_file(path: Path, contents: Any) -> None:
    """Write a file of this worker, which replaces an earlier one once it is on disk. Not collective."""
    draft = path.with_name(f".draft-{path.name}")
    with _writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(draft, contents)
            put_in_place(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def newest_version(folder: StrPath, step: int | None = None) -> Version | None:
    """The newest undamaged version, optionally of a given step; None if there is no version. A collective call.

    Reads all of its files.

    Raises:
        CheckpointError: if all versions are damaged, or workers see different folders.
    """
    group, folder = session.current_group(), Path(folder)
    with group.guard():
        group.agree(f"loading the newest of step {step}")
        versions = {version.number: version for version in _versions(folder) if step in (None, version.step)}
        there = next(folder.glob("step-*"), None) is not None
        while True:  # as worker 0 sees the folder
            number, there = group.gather_numbers([max(versions, default=0), there], "which version there is")[0]
            if not number:
                break
            version = versions.pop(number, None)
            if version is None:
                raise CheckpointError(
                    f"Worker {group.rank} lacks a version in {folder}; let all workers see one folder."
                )
            fault = version.fault(group.rank, group.world_size)
            faults = group.agree(f"version {number} is read", fault is not None)
            if not any(faults):
                return version
            if group.rank == faults.index(True):
                logger.warning("%s is damaged, and an earlier version taken: %s", version.path, fault)
        if there:
            raise CheckpointError(
                f"{folder} has no whole checkpoint{'' if step is None else f' of step {step}'}; expected a folder "
                f"step-NUMBER with the files that its {MANIFEST} names. Remove what is there to start anew."
            )
        return None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn errors of the file system, also if torch has wrapped them, into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise CheckpointError(
            f"Nothing was saved to {folder}: {cause}. What was there before still is; make room or choose a folder "
            "that all workers can write to."
        ) from error


def _write(path: Path, contents: Any) -> tuple[int, int]:
    """Write a file, read it back, wait for the disk, and return its size and sum."""
    try:
        with path.open("wb") as file:
            torch.save(contents, file)
        _load(path, mapped=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:  # for one of an object without a name
        raise CheckpointError(
            "Expected tensors, numbers, strings, and lists, tuples and dictionaries of them, which can be read "
            f"without running code: {error}"
        ) from error
    sync(path)
    return _size_and_sum(path)


def _load(path: Path, mapped: bool) -> Any:
    return torch.load(path, weights_only=True, mmap=mapped, map_location="cpu")


def _size_and_sum(path: Path) -> tuple[int, int]:
    return path.stat().st_size, file_sum(path)


def _put_in_place(folder: Path, draft: Path, step: int, world_size: int, files: dict[str, tuple[int, int]]) -> None:
    number = max((version.number for version in _versions(folder)), default=0) + 1
    text = json.dumps({"number": number, "step": step, "world_size": world_size, "files": files})
    (draft / MANIFEST).write_text(json.dumps({"sum": zlib.crc32(text.encode()), "text": text}))
    sync(draft / MANIFEST)
    names = (f"step-{step:06d}{f'.{again}' if again else ''}" for again in count())
    name = next(name for name in names if not (folder / name).exists())
    put_in_place(draft, folder / name)
    try:
        (folder / name / LATEST).write_text(f"{name}\n")
        put_in_place(folder / name / LATEST, folder / LATEST)
    except OSError as error:  # the version is saved nevertheless
        logger.warning("%s does not tell the newest version, %s: %s", folder / LATEST, name, error)


def _versions(folder: Path) -> list[Version]:
    """The versions with a valid manifest, newest first."""
    versions = []
    for path in folder.glob("step-*"):
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            if zlib.crc32(manifest["text"].encode()) != manifest["sum"]:
                raise ValueError("its sum is another")
            versions.append(Version(path, **json.loads(manifest["text"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log = logger.warning if session.rank() == 0 else logger.debug
            log("%s is passed over, as its %s is not whole: %s", path, MANIFEST, error)
    return sorted(versions, key=lambda version: version.number, reverse=True)


def _remove(path: Path) -> None:
    """Remove a version. It is renamed first, so an incomplete version is never read."""
    draft = path.with_name(f".draft-{path.name}")
    try:
        path.rename(draft)
        shutil.rmtree(draft)
    except OSError as error:
        logger.warning("an old version stays in %s: %s", path, error)


@dataclass
class Rows:
    """Tensors with one row per node, saved with node IDs so that any number of workers can read them."""

    names: str  # the kind of node IDs, which must match when reading
    node_ids: Tensor  # (N,) int64, distinct
    columns: dict[str, Tensor]  # by name, (N, ...) each
    scalars: dict[str, Any]  # numbers by name, the same on all workers

    def packed(self) -> dict[str, Any]:
        """Convert to a dictionary on the CPU, to be saved by one worker."""
        [length] = {len(column) for column in self.columns.values()}
        if self.node_ids.shape != (length,) or self.node_ids.dtype != torch.int64:
            raise CheckpointError(
                f"node_ids is {self.node_ids.dtype} {tuple(self.node_ids.shape)}; expected int64 ({length},)."
            )
        columns = {name: column.detach().cpu() for name, column in self.columns.items()}
        return {"names": self.names, "node_ids": self.node_ids.cpu(), "columns": columns, "scalars": self.scalars}


def find_rows(version: Version, key: str, wanted: Rows) -> None:
    """Fill in columns, on the CPU, and scalars of this worker's nodes from all workers' files; not a collective call.

    `key` is the name of the `packed` rows in `part["rows"]` of a version that has been verified.

    Raises:
        CheckpointError: if rows are missing, of another width, or have IDs of another kind.
    """
    ids, order = wanted.node_ids.cpu().sort()
    filled = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    first = session.rank() % version.world_size
    for rank in [first, *(rank for rank in range(version.world_size) if rank != first)]:
        if rank != first and filled.all():
            break
        saved = version.read(rank)["rows"].get(key)
        if not saved:
            raise CheckpointError(f"{version.path} has no rows of these embeddings; load those that were saved.")
        if saved["names"] != wanted.names:
            raise CheckpointError(
                f"{version.path} has rows by {saved['names']}; this worker asks for them by {wanted.names}. Global IDs "
                "serve for one partitioning only: save with original_ids of the embedding."
            )
        shapes = {name: tuple(column.shape[1:]) for name, column in saved["columns"].items()}
        expected = {name: tuple(column.shape[1:]) for name, column in wanted.columns.items()}
        if any(shapes.get(name) != shape for name, shape in expected.items()):
            raise CheckpointError(
                f"{version.path} has rows of {shapes}; expected {expected}. The state of an optimizer is there if "
                "one of the same kind was saved."
            )
        wanted.scalars = saved["scalars"]
        place, is_own = find_sorted(ids, saved["node_ids"])
        rows, place = is_own.nonzero().squeeze(1), place[is_own]
        filled[place] = True
        for name, column in wanted.columns.items():
            column[order[place]] = saved["columns"][name][rows].to(column.dtype)
    if not filled.all():
        raise CheckpointError(
            f"{int((~filled).sum())} of this worker's {len(ids)} rows, such as that of node {int(ids[~filled][0])}, "
            f"are not in {version.path}. Name nodes as they were named when the rows were saved."
        )
