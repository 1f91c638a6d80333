"""A training script as V virtual workers: which are asked for, and how the script runs once for each.

[Note: the script again]
`sar.initialize_comms` in the script's main thread finds out that virtual workers are asked for. It then runs the script
again from its first line, as `__main__`, in a thread for each of them, and ends the process when they have ended. In
these threads `initialize_comms` finds itself set up. So what the script does before that call, it does V + 1 times.
"""

import importlib.machinery
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from sar.errors import ConfigError
from sar.outofcore.state import exits_of_its_own


class Wanted(NamedTuple):
    """Virtual workers that the environment asks for.

    parts: partitions, of which one is in memory at a time.
    folder: for what is not.
    """

    parts: int
    folder: Path


def wanted(environ: Mapping[str, str] = os.environ, argv: Sequence[str] = sys.argv) -> Wanted | None:
    """What SAR_RESIDENT, SAR_SPILL_DIR and SAR_PARTS ask for; None where they do not.

    Raises:
        ConfigError: where one is missing or makes no sense.
    """
    resident = environ.get("SAR_RESIDENT")
    if resident is None:
        return None
    if resident != "1":
        raise ConfigError(
            f"SAR_RESIDENT is {resident!r}; expected 1, the partitions that a worker process has in memory at a time. "
            "For more, start more processes."
        )
    if not environ.get("SAR_SPILL_DIR"):
        raise ConfigError("SAR_RESIDENT needs SAR_SPILL_DIR, a folder on a disk for what is not in memory.")
    parts = environ.get("SAR_PARTS") or _number_of_parts(argv)
    if parts is None or not str(parts).isdecimal() or int(parts) < 1:
        raise ConfigError(
            f"SAR_PARTS is {parts!r}, and no argument of the script names a directory of partitions; set it to the "
            "number of partitions."
        )
    return Wanted(int(parts), Path(environ["SAR_SPILL_DIR"]))


def _number_of_parts(argv: Sequence[str]) -> str | None:
    """Of the partitions that an argument names: a JSON file, or the directory of one."""
    for word in argv[1:]:
        named = Path(word.rpartition("=")[2])
        for file in [named] if named.suffix == ".json" else sorted(named.glob("*.json")) if named.is_dir() else []:
            with suppress(OSError, ValueError, TypeError, KeyError):
                return str(int(json.loads(file.read_text())["num_parts"]))
    return None


class Script:
    """The program that runs as `__main__`.

    Raises:
        ConfigError: where there is no file of it, as in a notebook.
    """

    def __init__(self) -> None:
        self._main = sys.modules["__main__"]
        self._code = _code_of(self._main)

    def run(self) -> int:
        """Run it from the first line, and return its exit status."""
        module = ModuleType("__main__", self._main.__doc__)
        for name in ("__file__", "__spec__", "__package__", "__loader__", "__cached__", "__builtins__"):
            if hasattr(self._main, name):
                setattr(module, name, getattr(self._main, name))
        sys.modules["__main__"] = module
        try:
            with exits_of_its_own():
                exec(self._code, module.__dict__)
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


def _code_of(main: ModuleType) -> CodeType:
    spec: importlib.machinery.ModuleSpec | None = getattr(main, "__spec__", None)
    loader: Any = getattr(spec, "loader", None)
    if spec is not None and loader is not None:  # python -m
        code: CodeType | None = loader.get_code(spec.name)
        if code is not None:
            return code
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        raise ConfigError(
            "Virtual workers (SAR_RESIDENT) run a script once for each; there is no file of this program."
        )
    with io.open_code(os.path.abspath(file)) as stream:
        return compile(stream.read(), file, "exec")
