"""Processes that execute the code blocks of a page: Python on W workers, commands in processes of their own."""

import atexit
import contextlib
import faulthandler
import glob
import io
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.pages.blocks import Block
from tests.python_process import run
from tests.workers import ONE_THREAD, REPOSITORY, ensure_fork_server, forked

IN_PROCESS = ("chunk", "inspect", "partition", "plan")
"""Commands of `sar` that start no processes: they run in forked ones, which have imported everything."""


class PageFailure(AssertionError):
    """A block that failed."""


class PageProcesses:
    """The workers of a page, forked as those of `tests.workers` are, that find each other as under torchrun.

    Args:
        world_size: W.
        folder: where they and the commands are.
        limit: seconds that all of it may take.
    """

    def __init__(self, world_size: int, folder: Path, limit: float):
        self._folder = folder
        self._limit = limit
        self._bin = folder.parent / "bin"
        self._bin.mkdir()
        for name, module in (("sar", "sar.cli"), ("torchrun", "torch.distributed.run"), ("python", "")):
            program = f'#!/bin/sh\nexec {sys.executable} {module and f"-m {module} "}"$@"\n'
            (self._bin / name).write_text(program)
            (self._bin / name).chmod(0o755)
        self._plain = dict(os.environ) | ONE_THREAD | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
        self._plain["PATH"] = f"{self._bin}:{os.environ['PATH']}"
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        shared |= {"TORCHELASTIC_RUN_ID": secrets.token_hex(8)}
        self._ranks = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world_size)]
        self._processes: dict[Connection, Any] = {}
        self._workers: list[Connection] = []
        ensure_fork_server()

    def _start(self, environment: dict[str, str], log: Path) -> Connection:
        log.touch()
        ours, theirs = Pipe()
        with theirs:
            process = forked.Process(target=_work, args=(theirs, self._folder, environment, log, self._limit))
            process.start()
        self._processes[ours] = process
        return ours

    def python(self, block: Block, page: Path, known: dict[str, Any]) -> None:
        """Run a block on all workers, which find `known` among their names."""
        if not self._workers:
            for rank, own in enumerate(self._ranks):
                environment = self._plain | {key: str(value) for key, value in own.items()}
                self._workers.append(self._start(environment, self._folder.parent / f"worker-{rank}.log"))
        for channel in self._workers:
            channel.send((block.code, str(page), block.line, known))
        failures = [self._hear(channel) for channel in self._workers]
        if any(failures):
            raise PageFailure("\n".join(failure for failure in failures if failure))

    def commands(self, code: str) -> str:
        """Run commands, and return what they print; a status other than 0 is a failure."""
        plain = re.sub(r"(^|\s)#.*", "", code.replace("\\\n", " "), flags=re.MULTILINE)
        commands = [shlex.split(line) for line in plain.splitlines() if line.strip()]
        if all(words[0] == "sar" and words[1] in IN_PROCESS for words in commands) and not set("$|<>&") & set(plain):
            return "".join(self._command(words) for _, *words in commands)
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))  # so that `sar launch` starts two workers
        with subprocess.Popen(
            ["taskset", "-c", cores, "bash", "-e", "-o", "pipefail", "-c", code],
            cwd=self._folder,
            env=self._plain,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as shell:
            try:
                said, _ = shell.communicate(timeout=self._limit)
            except BaseException:
                os.killpg(shell.pid, signal.SIGKILL)
                raise
        if shell.returncode != 0:
            raise PageFailure(f"exit status {shell.returncode} of\n{code}\n{said}")
        return said

    def _command(self, words: list[str]) -> str:
        """What `sar` prints; patterns become names, as in a shell."""
        names = [name for word in words for name in sorted(glob.glob(word, root_dir=self._folder)) or [word]]
        done = run("-m", "sar.cli", *names, cwd=self._folder, env=self._plain, merged=True, timeout=self._limit)
        if done.returncode != 0:
            raise PageFailure(f"exit status {done.returncode} of sar {shlex.join(words)}\n{done.stdout}")
        return done.stdout

    def close(self) -> None:
        """End the workers; those that do not end by themselves are killed."""
        for channel in self._workers:
            channel.send(None)
        for channel in self._workers:
            self._end(channel)

    def kill(self) -> None:
        """End whatever is left, at once."""
        for channel, process in self._processes.items():
            process.kill()
            process.join()
            channel.close()

    def _hear(self, channel: Connection) -> str | None:
        """What went wrong there, or None."""
        if not wait([channel], self._limit):
            return f"took more than {self._limit} s"
        try:
            said: str | None = channel.recv()
        except (EOFError, ConnectionResetError):
            logs = sorted(self._folder.parent.glob("*.log"))
            return "a process died:\n" + "\n".join(f"{log.name}: {log.read_text()[-4000:]}" for log in logs)
        return said

    def _end(self, channel: Connection) -> None:
        process = self._processes.pop(channel)
        process.join(20)
        process.kill()
        process.join()
        channel.close()


def _work(channel: Connection, folder: Path, environment: dict[str, str], log: Path, limit: float) -> None:
    """A worker: execute one block after the other among the same names."""
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    module = sys.modules["page"] = ModuleType("page")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (message := channel.recv()) is not None:
            code, page, line, known = message
            module.__dict__.update(known)
            error = None
            try:
                exec(compile("\n" * (line - 1) + code, page, "exec"), module.__dict__)
            except BaseException:
                text = io.StringIO()
                traceback.print_exc(file=text)
                error = text.getvalue()
            channel.send(error)
    module.__dict__.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    os._exit(0)
