"""Python programs in processes forked from the server of `tests.workers`, which spares each seconds of imports.

    done = run("-m", "sar.cli", "inspect", folder, timeout=60)        # done.returncode, done.stdout, done.stderr
    worker = PythonProcess("-c", "print(1)")                          # to be signalled, or waited for

As `subprocess` does it with `sys.executable`, but torch, DGL and sar are imported already. Tests of imports, of options
of the interpreter and of memory start an interpreter of their own.
"""

import atexit
import fcntl
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from multiprocessing import resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.workers import REPOSITORY, ensure_fork_server, forked


class PythonProcess:
    """A running program: what tests use of `subprocess.Popen`, with text that waits in memory until it is asked for.

    Args:
        arguments: those of the interpreter (`-c CODE`, `-m MODULE` or a file), and the program's own.
        cwd: where it runs.
        env: its environment; by default that of this process.
        merged: whether errors go where the output goes.
        start_new_session: whether it leads a process group of its own.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path = REPOSITORY,
        env: Mapping[str, str] | None = None,
        merged: bool = False,
        start_new_session: bool = False,
    ) -> None:
        ensure_fork_server()
        self.args = [str(argument) for argument in arguments]
        self._outputs = [os.memfd_create("output"), os.memfd_create("errors")]
        for output in self._outputs:  # in memory, writes of two processes at once replace each other unless they append
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
        self._heard = 0
        ends = [_Inherited(self._outputs[0]), _Inherited(self._outputs[0 if merged else 1])]
        environment = dict(os.environ if env is None else env)
        self._process = forked.Process(
            target=_program, args=(self.args, str(cwd), environment, start_new_session, ends)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def __del__(self) -> None:
        for descriptor in self._outputs:
            os.close(descriptor)

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def line(self, timeout: float = 60) -> str:
        """The next line of the output, waited for; "" if there is none."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.returncode is not None
            line, end, _ = self._rest().partition("\n")
            if end or ended or time.monotonic() > deadline:
                self._heard += len((line + end).encode())
                return line + end
            time.sleep(0.01)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, self._rest(), _text(self._outputs[1]))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of what it writes and its errors, when it has ended."""
        self.wait(timeout)
        return self._rest(), _text(self._outputs[1])

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def _rest(self) -> str:
        return _text(self._outputs[0], self._heard)


def run(*arguments: object, timeout: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; one that overruns is killed. `how` is as for `PythonProcess`."""
    process = PythonProcess(*arguments, **how)
    try:
        said, errors = process.communicate(timeout)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.wait(), said, errors)


class _Inherited:
    """A descriptor that goes along to a process that is about to start."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self.descriptor),)


def _detached(duplicate: Any) -> int:
    descriptor: int = duplicate.detach()
    return descriptor


def _text(descriptor: int, begin: int = 0) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, begin).decode(errors="replace")


def _program(
    arguments: list[str], cwd: str, environment: dict[str, str], start_new_session: bool, ends: list[int]
) -> None:
    """Become the program. It ends as the interpreter would, without the seconds of taking torch and DGL apart."""
    if start_new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    # A tracker of its own, which removes what the program leaves behind, however it ends.
    tracker = resource_tracker._resource_tracker
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None
    for number, descriptor in enumerate(ends, start=1):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False, errors="backslashreplace") for number in (1, 2))
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    interrupted = False
    try:
        _execute(arguments)
    except KeyboardInterrupt:
        traceback.print_exc()
        interrupted = True
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _execute(arguments: list[str]) -> None:
    kind, *others = arguments
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *others[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
