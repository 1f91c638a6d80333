"""Spawns and supervises worker processes on this host; all have ended when the call returns."""

import ctypes
import multiprocessing
import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from sar.errors import CommunicationTimeout, PeerError, SarError

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
GRACE = 3.0
"""Seconds for other workers to report why they stop after one has failed."""


class WorkerError(SarError, RuntimeError):
    """A worker process raised an exception or died; the message holds its traceback."""


class _Message(NamedTuple):
    """A message from a worker to its parent; `kind` is "progress", "result" or "error"."""

    kind: str
    content: Any
    is_echo: bool = False  # whether an error only repeats that another worker failed


def run_workers(
    target: Callable[..., Any],
    *args: Any,
    n_workers: int,
    n_threads: int,
    time_limit: float,
    on_progress: Callable[[Any], None] = lambda _: None,
    host: str = "127.0.0.1",
) -> list[Any]:
    """Call `target(report, *args)` in spawned processes and return their results, by rank.

    The workers find each other as under `torchrun`: `sar.initialize_comms()` needs no arguments. The rendezvous store
    is in this process, at a port chosen by the kernel, so no other program can take the port in between.

    Args:
        target: a top-level function; `report(anything)` in a worker calls `on_progress(anything)` here.
        args: picklable arguments.
        n_workers: W.
        n_threads: threads of each worker.
        time_limit: seconds after which all workers are killed.
        on_progress: called with each report of a worker.
        host: the address of the store, the only one at which it listens.
    """
    listener = socket.create_server((host, 0))  # torch's own would listen on all interfaces
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    shared = {
        "WORLD_SIZE": n_workers,
        "LOCAL_WORLD_SIZE": n_workers,
        "MASTER_ADDR": host,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "OMP_NUM_THREADS": n_threads,
        "NUMBA_NUM_THREADS": n_threads,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, SpawnProcess] = {}
    before = dict(os.environ)
    try:
        try:
            for rank in range(n_workers):
                parent_end, child_end = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(child_end, target, args), daemon=True)
                variables = shared | {"RANK": rank, "LOCAL_RANK": rank}  # inherited by the process
                os.environ.update({name: str(value) for name, value in variables.items()})
                with child_end:
                    process.start()
                processes[parent_end] = process
        finally:
            os.environ.clear()
            os.environ.update(before)
        return _supervise(processes, time_limit, on_progress)
    finally:
        _end(processes)


def _supervise(
    processes: dict[Connection, SpawnProcess], time_limit: float, on_progress: Callable[[Any], None]
) -> list[Any]:
    """Receive messages until every worker has ended, one has failed, or the time limit is reached."""
    results: dict[int, Any] = {}
    failures: dict[int, _Message] = {}
    ranks = {channel: rank for rank, channel in enumerate(processes)}
    open_channels = set(processes)
    deadline = time.monotonic() + time_limit
    while open_channels and (left := deadline - time.monotonic()) > 0:
        for channel in wait(list(open_channels), left):
            assert isinstance(channel, Connection)
            rank = ranks[channel]
            try:
                message = channel.recv()
            except (EOFError, ConnectionResetError):
                open_channels.discard(channel)
                if rank in results or rank in failures:
                    continue
                processes[channel].join(GRACE)
                code = processes[channel].exitcode
                end = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
                end += ", as if memory was short" if code == -signal.SIGKILL else ""
                message = _Message("error", f"worker {rank} died without a traceback ({end}).")
            if message.kind == "progress":
                on_progress(message.content)
            elif message.kind == "result":
                results[rank] = message.content
            else:
                failures[rank] = message
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        raise WorkerError(min(failures.values(), key=lambda failure: failure.is_echo).content)
    if open_channels:
        late = sorted(ranks[channel] for channel in open_channels)
        raise CommunicationTimeout(f"worker {late} did not finish within {time_limit:g} s and was killed.")
    return [results[rank] for rank in range(len(processes))]


def _end(processes: dict[Connection, SpawnProcess]) -> None:
    """Wait for workers that are about to exit, kill the others, and reap all."""
    for channel, process in processes.items():
        channel.close()
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes.values():
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _work(channel: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run `target` in this worker and send its result or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent in all cases
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != os.getppid():
        os._exit(1)
    try:
        result = target(lambda content: channel.send(_Message("progress", content)), *args)
        channel.send(_Message("result", result))
    except Exception as error:
        where = f"worker {os.environ['RANK']} failed:\n{traceback.format_exc()}"
        channel.send(_Message("error", where.rstrip(), is_echo=isinstance(error, PeerError)))
