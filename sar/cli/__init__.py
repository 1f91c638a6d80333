"""The command line: parses arguments and runs a command of `sar`."""

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module

from sar import __version__
from sar.cli.arguments import COMMANDS
from sar.errors import SarError
from sar.removed import advice


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, or 1 after an error of sar.

    Args:
        argv: arguments without the program name; None reads the command line.
    """
    with _printing():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> int:
    for word in argv:
        name = f"sar {' '.join(dict.fromkeys([argv[0], word.partition('=')[0]]))}"
        if argv[0] != "launch" and (told := advice(name)) is not None:
            print(told, file=sys.stderr)
            return 2
    parser = argparse.ArgumentParser(prog="sar", description="Train graph neural networks on whole graphs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, what) in COMMANDS.items():
        # Arguments after the script of `sar launch` belong to the script, even if they look like options.
        add_arguments(commands.add_parser(name, help=what, description=what, allow_abbrev=name != "launch"))
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    before = signal.signal(signal.SIGTERM, _end) if threading.current_thread() is threading.main_thread() else None
    try:
        status: int = import_module(f"sar.cli.{arguments.command}").run(arguments)
    except KeyboardInterrupt:
        print(f"sar {arguments.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except SarError as error:
        print(f"sar {arguments.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _OF_THE_FILE_SYSTEM:
            raise
        named = f": {error.filename}" if error.filename is not None else ""
        print(f"sar {arguments.command}: {error.strerror}{named}", file=sys.stderr)
        return 1
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return status


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Escape characters that the terminal does not support, and exit cleanly if the output cannot be written.

    This happens silently if the reader of a pipe exits, as `head` does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        if error.errno == errno.EPIPE:
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise SystemExit(f"sar: the output cannot be written ({error.strerror})") from None


_OF_THE_FILE_SYSTEM = (
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EISDIR, errno.EMFILE, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
)  # fmt: skip
"""Errors that users can fix with another path or more space, so we print no traceback."""


def _end(number: int, _: object) -> None:
    """Exit as the signal requests, after `finally` and `with` blocks clean up."""
    raise SystemExit(128 + number)
