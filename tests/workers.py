"""Worker processes for tests: kept alive, sent one case at a time, killed when they overrun.

A case is a top-level function of a test module. Its arguments and results travel by pickle over a pipe, never through
shared memory, so nothing outlives the workers.

    pool = WorkerPool(2)
    pool.run(case, 1, 2)                           # [case(1, 2) on rank 0, case(1, 2) on rank 1]
    pool.run(case, 1, per_rank=["a", "b"])         # [case("a", 1), case("b", 1)]
    pool.outcomes(case, 1, 2)                      # [Ok(value=...), Err(kind="ZeroDivisionError", ...)]

The processes are forked from a server (Python's own, of multiprocessing) that has imported torch, DGL and sar and has
no threads: importing would take each of them seconds, and tests of failures need hundreds.
"""

import atexit
import contextlib
import datetime
import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import random
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from tests import filled_memory

filled_memory.install()  # in the server from which workers are forked, too
REPOSITORY = Path(__file__).resolve().parent.parent

START_LIMIT = 120.0
"""Seconds that the workers of a pool may take to import torch, DGL and sar and to find each other."""
CLOSE_LIMIT = 10.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
GRACE = 3.0
"""Seconds by which the parent waits longer than the worker's own watchdog, which leaves a traceback behind."""

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["tests.loaded", "dgl", "pytest", "hypothesis", "tests.workers"])


@dataclass(frozen=True)
class Ok:
    """What a case returned on one rank."""

    value: Any


@dataclass(frozen=True)
class Err:
    """How a case failed on one rank; `kind` is an exception's name, or "Died" or "Overran"."""

    kind: str
    message: str
    traceback: str = ""
    bases: tuple[str, ...] = ()

    def is_a(self, name: str) -> bool:
        return name == self.kind or name in self.bases


class WorkerFailure(AssertionError):
    """A case that failed on some rank; carries the outcomes of all ranks."""

    def __init__(self, case: str, outcomes: Sequence[Ok | Err]):
        self.outcomes = list(outcomes)
        lines = [f"{case} failed"]
        for rank, outcome in enumerate(self.outcomes):
            if isinstance(outcome, Err):
                lines += [f"--- rank {rank}: {outcome.kind}: {outcome.message}", outcome.traceback]
            else:
                lines.append(f"--- rank {rank}: returned")
        super().__init__("\n".join(lines))


class _Worker:
    """One process, the pipe to it, and the file its output goes to."""

    def __init__(self, rank: int, world_size: int, backend: str, directory: Path):
        self.log = directory / f"worker-{rank}.log"
        self.log.touch()
        self.channel, theirs = Pipe()
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(directory / "tmp")} | ONE_THREAD
        if backend == "nccl":
            environment["LOCAL_RANK"] = str(rank)
        with theirs:
            given = (theirs, rank, world_size, backend, environment, self.log)
            self.process = forked.Process(target=_serve, args=given)
            self.process.start()

    def send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead worker is noticed when it is heard
            self.channel.send_bytes(message)

    def epitaph(self, kind: str, reason: str) -> Err:
        """Kill the process if need be, and say how it ended."""
        self.process.join(GRACE)
        self.end()
        status = self.process.exitcode or 0
        end = f"signal {-status}" if status < 0 else f"exit status {status}"
        return Err(kind, f"{reason} ({end})", self.log.read_text(errors="replace")[-8000:])

    def end(self) -> None:
        """Kill the process, if it lives, and reap it."""
        self.process.kill()
        self.process.join()


class WorkerPool:
    """`world_size` worker processes in one process group, with sar initialised; over nccl, each on its own device.

    The workers start at the first case. All are replaced, in a fresh process group, after a case that failed in `run`,
    and after one in which a worker died, overran its limit, or ended unlike the others (one raised, another returned).
    """

    each = 1
    """Workers in a process."""

    def __init__(self, world_size: int, backend: str = "gloo"):
        self.world_size = world_size
        self.backend = backend
        self.port = 0
        self._workers: list[_Worker] = []
        self._stopped = False  # whether the last case left distributed calls stopped on some worker
        self._final = False  # and beyond recovery
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, per_rank: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call `function(*args)` on every worker and return the results by rank.

        Args:
            function: a top-level function of an importable module.
            args: picklable arguments.
            timeout: seconds after which the workers are killed.
            per_rank: one more argument for each rank, passed before `args`.

        Raises:
            WorkerFailure: the case raised, died or overran on some rank.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout, per_rank=per_rank)
        if any(isinstance(outcome, Err) for outcome in outcomes):
            self._kill()
            raise WorkerFailure(f"{function.__module__}.{function.__qualname__}", outcomes)
        return [outcome.value for outcome in outcomes if isinstance(outcome, Ok)]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, per_rank: Sequence[Any] | None = None
    ) -> list[Ok | Err]:
        """As `run`, but return for each rank how the case ended there."""
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not a top-level function; a worker cannot import it.")
        if per_rank is not None and len(per_rank) != self.world_size:
            raise ValueError(f"per_rank has {len(per_rank)} entries for {self.world_size} workers.")
        self._start()
        name = (function.__module__, function.__qualname__)
        for rank, worker in enumerate(self._workers):
            arguments = args if per_rank is None else (per_rank[rank], *args)
            worker.send(_pickle((*name, arguments, timeout, self._stopped)))
        outcomes = self._collect(timeout)
        # What one rank's failure left in the others is unknown, unless all raised.
        died = any(worker.process.exitcode is not None for worker in self._workers)
        if died or self._final or len({type(outcome) for outcome in outcomes}) > 1:
            self._kill()
        return outcomes

    def close(self) -> list[int]:
        """Let the workers finish, kill those that do not within `CLOSE_LIMIT`, and return their exit statuses."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + CLOSE_LIMIT
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        statuses = [worker.process.exitcode for worker in self._workers]
        self._kill()
        return [-9 if status is None else status for status in statuses]

    def _start(self) -> None:
        if self._workers:
            return
        ensure_fork_server()
        self._directory = tempfile.TemporaryDirectory(prefix=f"sar-workers-{os.getpid()}-")
        directory = Path(self._directory.name)
        (directory / "tmp").mkdir()
        self._workers = [_Worker(rank, self.world_size, self.backend, directory) for rank in range(self.world_size)]
        try:
            self.port = self._listen(self._workers[0])
            for worker in self._workers[1:]:
                worker.send(_pickle(self.port))
            for worker in self._workers:
                self._listen(worker)
        except BaseException:
            self._kill()
            raise

    @staticmethod
    def _listen(worker: _Worker) -> Any:
        if not worker.channel.poll(START_LIMIT):
            raise RuntimeError(f"A worker took more than {START_LIMIT} s to start: {worker.epitaph('Overran', '')}")
        try:
            return pickle.loads(worker.channel.recv_bytes())
        except EOFError:
            raise RuntimeError(f"A worker died while starting:\n{worker.epitaph('Died', '').traceback}") from None

    def _collect(self, timeout: float) -> list[Ok | Err]:
        began = time.monotonic()
        heard: dict[int, Ok | Err] = {}
        self._stopped = self._final = False
        ranks = {worker.channel: rank for rank, worker in enumerate(self._workers)}
        while len(heard) < self.world_size:
            waiting = [channel for channel, rank in ranks.items() if rank not in heard]
            ready = wait(waiting, max(0.0, began + timeout + GRACE - time.monotonic()))
            for channel in ready or waiting:
                rank = ranks[channel]
                worker = self._workers[rank]
                try:
                    if not ready:
                        raise TimeoutError
                    outcome, stopped, final = pickle.loads(channel.recv_bytes())
                    heard[rank] = pickle.loads(outcome)
                    self._stopped |= stopped
                    self._final |= final
                except (EOFError, ConnectionResetError, TimeoutError):
                    if time.monotonic() - began >= timeout:
                        heard[rank] = worker.epitaph("Overran", f"rank {rank} overran its limit of {timeout} s")
                    else:
                        heard[rank] = worker.epitaph("Died", f"rank {rank} died")
        return [heard[rank] for rank in range(self.world_size)]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.end()
            worker.channel.close()
        self._workers = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


_shared: dict[int, WorkerPool] = {}


def shared_pool(world_size: int) -> WorkerPool:
    """The session's pool of this size, which lives until `close_shared_pools`."""
    return _shared.setdefault(world_size, WorkerPool(world_size))


def close_shared_pools() -> None:
    while _shared:
        _shared.popitem()[1].close()


def end_helper_processes() -> None:
    """End what multiprocessing keeps beside its processes: the server first, as it holds a pipe to the tracker."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def ensure_fork_server() -> None:
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # read when torch and numba are imported
    forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes: torch's own reduction would write a view's whole storage."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        data = value.detach().cpu().contiguous()
        return _tensor, (
            data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy().tobytes(),
            data.dtype,
            tuple(data.shape),
        )


def _pickle(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _serve(
    channel: Connection, rank: int, world_size: int, backend: str, environment: dict[str, str], log: Path
) -> None:
    """The worker's main loop: receive a case, run it, send back how it ended; until the pipe closes."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own has a name in /dev/shm, which a worker that is killed leaves behind
    reset = _join(channel, rank, world_size, backend)
    group = _group()
    channel.send_bytes(_pickle("ready"))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            module, name, arguments, timeout, stopped = pickle.loads(channel.recv_bytes())
            reset()
            faulthandler.dump_traceback_later(timeout, exit=True)
            outcome = _outcome(module, name, arguments, stopped)
            faulthandler.cancel_dump_traceback_later()
            channel.send_bytes(_pickle((outcome, group.failure is not None, group.final)))
    faulthandler.dump_traceback_later(CLOSE_LIMIT / 2, exit=True)
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    os._exit(0)  # finalising torch, numba and DGL would take seconds on a busy machine


def _join(channel: Connection, rank: int, world_size: int, backend: str) -> Callable[[], None]:
    """Join the process group, at a port that rank 0 got from the kernel, and return what resets the global state."""
    import sar
    from sar.comm.allocator import set_allocator

    port = 0 if rank == 0 else pickle.loads(channel.recv_bytes())
    limit = datetime.timedelta(seconds=START_LIMIT)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    if rank == 0:
        channel.send_bytes(_pickle(store.port))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    sar.initialize_comms(rank, world_size)
    defaults = {name: getattr(sar.Config, name) for name in sar.Config.__annotations__}

    def reset() -> None:
        for name, value in defaults.items():
            setattr(sar.Config, name, value)
        set_allocator()  # a loader of mini-batches in an earlier case kept freed memory
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  what user code may draw from
        random.seed(0)

    return reset


def _group() -> Any:
    from sar.comm.session import current_group

    return current_group()


def _outcome(module: str, name: str, arguments: tuple[Any, ...], stopped: bool) -> bytes:
    try:
        if stopped:
            _group().recover(0)
        return _pickle(Ok(getattr(importlib.import_module(module), name)(*arguments)))
    except Exception as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return _pickle(Err(type(error).__name__, str(error), traceback.format_exc(), bases))
