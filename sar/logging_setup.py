"""The package's logger and its set-up; until somebody sets up logging, Python prints warnings to standard error."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

logger = logging.getLogger("sar")


def logging_setup(
    log_level: int | str, _rank: int = -1, _world_size: int = -1, log_file: str | PathLike[str] | None = None
) -> None:
    """Send sar's log to the terminal or to a file, with rank and time in every line.

    Args:
        log_level: a level of `logging`, as number or name.
        _rank: this worker's rank; left out of the lines when negative.
        _world_size: number of workers; left out when negative.
        log_file: file to append to; None for standard error.
    """
    where = f" {_rank}" if _rank >= 0 else ""
    where += f"/{_world_size}" if where and _world_size >= 0 else ""
    handler = logging.FileHandler(log_file) if log_file is not None else logging.StreamHandler()
    handler.setFormatter(_form(where))
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(log_level)


@contextmanager
def told_on_stderr() -> Iterator[None]:
    """Send what sar does inside, level INFO, to standard error, as commands do where that is no terminal."""
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(_form())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _form(where: str = "") -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s sar{where} %(levelname)s %(message)s")
