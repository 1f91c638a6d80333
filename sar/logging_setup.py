"""The package's logger and its configuration, and printing of errors that end a script."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from types import TracebackType

from sar.errors import SarError

logger = logging.getLogger("sar")


def logging_setup(
    log_level: int | str, _rank: int = -1, _world_size: int = -1, log_file: str | PathLike[str] | None = None
) -> None:
    """Send sar's log to the terminal or to a file, with rank and time in every line.

    Args:
        log_level: a level of `logging`, as number or name.
        _rank: this worker's rank; omitted from lines if negative.
        _world_size: number of workers; omitted if negative.
        log_file: file to append to. Default None: standard error.
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
    """Send the log of level INFO to standard error, for commands whose standard error is not a terminal."""
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


@cache
def print_errors_briefly() -> None:
    """Print the message of an error of sar, or of Ctrl-C, that ends the script, followed by only the script's frames.

    Every worker prints its error, so frames inside sar and torch would hide the message. They are printed if the log
    has level DEBUG. Other errors are printed as usual.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SarError | KeyboardInterrupt) or logger.isEnabledFor(logging.DEBUG):
            before(kind, error, trace)
            return
        inside = tuple(f"{Path(str(sys.modules[name].__file__)).parent}/" for name in ("sar", "torch"))
        frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(inside)]
        calls = "".join(traceback.format_list(frames))
        print(f"{''.join(traceback.format_exception_only(error))}in\n{calls}", end="", file=sys.stderr)

    sys.excepthook = hook
