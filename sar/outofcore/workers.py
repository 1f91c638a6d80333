"""`initialize_comms`, and several workers in one process: the script runs once for each of them, in a thread.

[Note: the script again]
If the environment asks for several workers in a process, `sar.initialize_comms` in the script's main thread runs the
script again from its first line, as `__main__`, in a thread for each of them. It ends the process when they have ended.
In these threads `initialize_comms` is already set up and returns. So the lines before that call run V + 1 times.

[Note: watching turns]
The main thread waits for the workers. If no turn passes and the process does not compute, it reports this after
`STALL_SECONDS`, with the stack of every worker: most likely one waits for a lock that another holds across a
distributed call. It ends them after half of `Config.timeout`, before other processes give up, and on Ctrl-C. Threads
that do not end are abandoned with the process.
"""

import ctypes
import importlib.machinery
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from sar.comm import session, setup
from sar.comm.group import Group
from sar.comm.replicas import Replicas
from sar.config import Config
from sar.data.partition_json import first_named
from sar.errors import CommunicationTimeout, ConfigError, PeerError
from sar.host.memory import anonymous_memory, available_memory, parse_bytes
from sar.logging_setup import logger
from sar.outofcore.residency import Residency
from sar.outofcore.spill import Disk, SpillFile
from sar.outofcore.state import STATE, exits_of_its_own, refusals
from sar.outofcore.transport import InProcessTransport
from sar.outofcore.turns import Swapped, Turns

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

POLL_SECONDS = 0.1
STALL_SECONDS = 30.0
"""Seconds without a turn after which a stall is reported for the first time, and again each time it has doubled."""
AT_HAND = 0.25
"""Fraction of the memory available before the first turn, for rows that all partitions read."""
OWN = 15 / 16
"""Fraction of a budget for the processes' own memory; the rest is for pages of files in use."""
GRACE = 10.0
"""Seconds that the workers have to end after an error."""
BUSY = 0.05
"""Share of a processor above which a process counts as computing."""


class Wanted(NamedTuple):
    """The environment's request for several workers in a process."""

    parts: int  # partitions of the graph; a process has one in memory at a time
    folder: Path  # folder of the spill files
    memory: int | None = None  # limit in bytes for all processes of this machine; None: all available memory


def wanted(environ: Mapping[str, str] = os.environ, argv: Sequence[str] = sys.argv) -> Wanted | None:
    """Read SAR_RESIDENT, SAR_MEMORY, SAR_SPILL_DIR and SAR_PARTS; None if neither of the first two is set."""
    size = environ.get("SAR_MEMORY")
    resident = environ.get("SAR_RESIDENT", None if size is None else "1")
    if resident is None:
        return None
    memory = None if size is None else parse_bytes(size)
    if resident != "1":
        raise ConfigError(
            f"SAR_RESIDENT is {resident!r}; expected 1, the partitions that a worker process has in memory at a time. "
            "For more, start more processes."
        )
    if not environ.get("SAR_SPILL_DIR"):
        raise ConfigError("SAR_MEMORY and SAR_RESIDENT need SAR_SPILL_DIR, a folder on a disk.")
    parts = environ.get("SAR_PARTS", "")
    if not parts and (named := first_named(argv[1:])) is not None:
        parts = str(named.num_parts)
    if not parts.isdecimal() or int(parts) < 1:
        raise ConfigError(
            f"SAR_PARTS is {repr(parts) if parts else 'not set'}, and no argument of the script, "
            f"{' '.join(argv[1:]) or 'which has none'}, names an existing directory of partitions; pass one, or set "
            "SAR_PARTS to the number of partitions."
        )
    return Wanted(int(parts), Path(environ["SAR_SPILL_DIR"]), memory)


def initialize_comms(
    _rank: int | None = None,
    _world_size: int | None = None,
    master_ip_address: str | None = None,
    backend: str | None = None,
    _comm_device: torch.device | str | None = None,
    master_port_number: int = setup.DEFAULT_PORT,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
) -> None:
    """Connect this worker to all others. Uses the process group of `torch.distributed` if it exists.

    Under torchrun, Slurm or MPI no arguments are needed. Without a launcher and without arguments, this is the only
    worker, with all partitions of a directory. The environment variable SAR_SOCKET_NAME selects the network interface.
    `Config.allocator` selects the settings of glibc's allocator. Further calls only check that their arguments are
    consistent. If SAR_RESIDENT requests several workers in this process, the script runs again for each of them, and
    this call does not return.

    Args:
        _rank: rank of this worker, 0 to `_world_size` - 1.
        _world_size: number of workers, which may differ from the number of partitions.
        master_ip_address: address or host name of worker 0.
        backend: `gloo` (default), or `nccl` for CUDA devices (untested with more than one worker). `mpi` and `ccl` are
            passed to `torch.distributed` (untested), and sar itself then uses gloo.
        _comm_device: device of tensors that are sent. Default: the CPU, or with nccl one CUDA device per process, by
            the launcher's local rank, which also becomes the current device.
        master_port_number: TCP port of worker 0. A port announced by `nfs_ip_init` takes precedence, and a launcher's
            MASTER_PORT replaces the default.
        group: the workers of this graph, if not all: a process group of `torch.distributed` that contains this process,
            or a `DeviceMesh` with one dimension, such as `mesh["graph"]`. `rank`, sums, checkpoints and errors are then
            limited to this group.

    Raises:
        ConfigError: arguments are missing, contradict each other or the existing process group, or this process is
            not in `group`.
        CommunicationError: workers cannot be reached within `Config.timeout`, or belong to another job: see
            [Note: one job].
        DisagreementError: workers have different backends, or different versions of sar, torch or DGL.
    """
    asked = None if session.is_initialized() else wanted()
    if asked is not None and threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "Workers that share a process (SAR_RESIDENT) run a script once for each, from its main thread; this is the "
            f"thread {threading.current_thread().name!r}, as under Ray Train. Start the script with `sar launch`, "
            "torchrun, srun or mpirun."
        )
    if asked is not None and group is not None:
        raise ConfigError("Workers that share a process (SAR_RESIDENT) are a job of their own; leave `group` out.")
    setup.connect(
        *(_rank, _world_size, master_ip_address, backend, _comm_device, master_port_number),
        within=group,
        shares_process=asked is not None,
    )
    if asked is not None:
        _run_script_again(asked)


def _run_script_again(asked: Wanted) -> None:
    """Run the script once per worker, and exit with the greatest of its exit statuses: see [Note: the script again]."""
    group = session.current_group()
    size = -(-asked.parts // group.world_size)
    if size == 1:
        return
    main, code = sys.modules["__main__"], None
    spec: importlib.machinery.ModuleSpec | None = getattr(main, "__spec__", None)
    loader: Any = getattr(spec, "loader", None)
    if spec is not None and loader is not None:  # python -m
        code = loader.get_code(spec.name)
    if code is None:
        file = getattr(main, "__file__", None)
        if file is None or not os.path.isfile(file):
            raise ConfigError(
                "Workers that share a process (SAR_RESIDENT) run a script once for each, but this program has no file."
            )
        with io.open_code(os.path.abspath(file)) as stream:
            code = compile(stream.read(), file, "exec")
    with group.guard():
        group.agree(f"starting {size} workers in each process")
    threads = run_in_turns(size, lambda place: _run_script(main, code), asked.folder, asked.memory)
    status = max((result for result in threads.results if result is not None), default=0)
    if (failure := threads.first_failure()) is not None:
        print(f"Worker {threads.turns.first + failure[0]} of {size * group.world_size} failed:", file=sys.stderr)
        traceback.print_exception(failure[1])
        status = status or 1
    if threads.some_left:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def run_in_turns(
    size: int, work: Callable[[int], Any], folder: Path | None, memory: int | None = None
) -> "WorkerThreads":
    """Run `work(place)` as `size` workers of this process, and return the threads with their results and failures.

    `size` is V, the same in all processes. `folder` is for tensors out of memory; None keeps all tensors in memory.
    `memory` is the budget of all processes of this machine, see [Note: budget]; None: all available memory.
    """
    process = session.current_group()
    if process.device.type != "cpu":
        raise ConfigError(
            "Workers that share a process (SAR_RESIDENT) compute and communicate on the CPU; use the backend gloo."
        )
    turns = Turns(size, process.rank * size, (*STATE, Swapped(session.current_group, session.set_current)))
    residencies: list[Residency] = []
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    room, limit = available_memory() / of_host, float("inf")
    if memory is not None:
        limit = (OWN * memory - anonymous_memory(os.environ.get("SAR_LAUNCHER", "none"))) / of_host
        room = min(room, limit - anonymous_memory())
    with process.guard():
        if room <= 0:
            raise ConfigError(
                f"No memory is left for the graph: Python and its libraries take {anonymous_memory() / 1e6:,.0f} MB of "
                f"each process. Allow {-room * of_host / OWN / 1e6:,.0f} MB more, and memory for a partition: --memory "
                "(SAR_MEMORY)."
            )
        share = torch.tensor(max(AT_HAND * room, 1), dtype=torch.float64, device="cpu")
        at_hand = float(torch.stack(process.all_gather(share, "memory that is available")).min())

    def run(place: int) -> Any:
        residency = residencies[place] if residencies else None
        group = Group(InProcessTransport(process, turns, place, residencies))
        group.replicas = Replicas()
        session.set_current(group)
        torch.set_autocast_cache_enabled(False)  # all threads share the cache, so hits would depend on the turns
        try:
            with nullcontext() if residency is None else residency.in_thread():
                return work(place)
        except BaseException as error:  # the other processes must learn of any exception
            group.abort(error, final=True)
            raise
        finally:
            group.replicas.close()

    threads, disk = WorkerThreads(turns, run), Disk(at_hand, limit)
    process.stand_for(size)
    try:
        with process.guard():
            residencies.extend(Residency(SpillFile(folder, disk), at_hand) for _ in range(size) if folder is not None)
        with refusals():
            threads.run(lambda: process.waiting is not None)
    finally:
        process.stand_for(1)
        session.set_current(process)
        turns.progress.clear()
        threads.some_left |= not disk.close()
        for residency in residencies if not threads.some_left else ():  # else they are in use, until the process ends
            residency.file.close()
    return threads


def _run_script(main: ModuleType, code: CodeType) -> int:
    """Run the script from its first line in a new module `__main__`, and return its exit status."""
    module = ModuleType("__main__", main.__doc__)
    for name in ("__file__", "__spec__", "__package__", "__loader__", "__cached__", "__builtins__"):
        if hasattr(main, name):
            setattr(module, name, getattr(main, name))
    sys.modules["__main__"] = module
    try:
        with exits_of_its_own():
            exec(code, module.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@dataclass(eq=False)
class WorkerThreads:
    """Runs `work(place)` in a thread for each of the workers that share the turns.

    results: the return value of each worker.
    failures: the exceptions, by place.
    some_left: whether threads do not end, so that the process has to end without them.
    """

    turns: Turns
    work: Callable[[int], Any]
    results: list[Any] = field(init=False, default_factory=list)
    failures: dict[int, BaseException] = field(init=False, default_factory=dict)
    some_left: bool = field(init=False, default=False)
    _threads: list[threading.Thread] = field(init=False, default_factory=list)

    def run(self, others_work: Callable[[], bool] = lambda: False) -> None:
        """Run all workers to their end: see [Note: watching turns].

        `others_work` returns whether this process waits for another process, which does not count as a stall.
        """
        self.results = [None] * self.turns.size
        for place in range(self.turns.size):
            name = f"sar-worker-{self.turns.first + place}"
            self._threads.append(threading.Thread(target=self._run, args=(place,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        interrupt: KeyboardInterrupt | None = None
        try:
            self._watch(others_work)
        except KeyboardInterrupt as error:
            interrupt = error
            self.turns.fail(PeerError("Ctrl-C has ended the workers of this process."), now=True)
            for thread in self._threads:
                if thread.is_alive() and thread.ident is not None:
                    number, raised = ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, raised)
        # Wait for the threads to end; after an error for `GRACE` seconds at most.
        deadline = time.monotonic() + (GRACE if self.turns.ended_by is not None else float("inf"))
        for thread in self._threads:
            thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
        for place, thread in enumerate(self._threads):
            if thread.is_alive():
                left_by = self.turns.ended_by
                self.failures.setdefault(place, left_by if left_by is not None else PeerError("still running"))
                self.some_left = True
                logger.error("worker %d does not end, and is left behind", self.turns.first + place)
        if interrupt is not None:
            raise interrupt

    def first_failure(self) -> tuple[int, BaseException] | None:
        """Place and exception of a failed worker, preferably not one that was told of another's failure."""
        return min(self.failures.items(), key=lambda failure: isinstance(failure[1], PeerError), default=None)

    def _run(self, place: int) -> None:
        try:
            self.turns.begin(place)
            self.results[place] = self.work(place)
        except BaseException as error:
            self.failures[place] = error
            description = "".join(traceback.format_exception_only(error)).strip()
            self.turns.fail(PeerError(f"Worker {self.turns.first + place} raised {description}"))
        finally:
            self.turns.end(place)

    def _watch(self, others_work: Callable[[], bool]) -> None:
        idle = reported = 0.0
        passes, used, before = self.turns.passes, time.process_time(), time.monotonic()
        while any(thread.is_alive() for thread in self._threads):
            time.sleep(POLL_SECONDS)
            if self.turns.ended_by is not None:
                return
            now, cpu = time.monotonic(), time.process_time()
            if self.turns.passes != passes or others_work() or cpu - used > BUSY * (now - before):
                idle = reported = 0.0
            else:
                idle += now - before
            passes, used, before = self.turns.passes, cpu, now
            if idle >= Config.timeout / 2:
                self.turns.fail(CommunicationTimeout(self._stuck(idle)), now=True)
            elif idle >= max(STALL_SECONDS, 2 * reported):
                reported = idle
                frames = sys._current_frames()
                lines = [self._stuck(idle), "\n"]
                for thread in self._threads:
                    if (frame := frames.get(thread.ident or 0)) is not None:
                        lines += [f"{thread.name}:\n", *traceback.format_stack(frame)]  # the innermost call last
                print("".join(lines), file=sys.stderr, flush=True)

    def _stuck(self, seconds: float) -> str:
        holder = self.turns.first + self.turns.holder
        return (
            f"Worker {holder} has the turn, and has not computed for {seconds:.0f} s; the others wait. Perhaps "
            "it waits for a lock that another worker keeps across a distributed call: release locks before such calls. "
            f"Its latest call: {self.turns.latest[self.turns.holder]}"
        )
