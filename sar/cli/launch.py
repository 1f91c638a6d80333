"""`sar launch`: torchrun for the workers of one host, with threads, network and allocator configured."""

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from sar.comm.allocator import preloads
from sar.data.partition_json import PartitionJson, first_named, read_partition_json
from sar.errors import ConfigError
from sar.host.huge_pages import left_alone
from sar.host.signals import ENDING
from sar.outofcore.workers import wanted

# Without mimalloc: workers that share a process need glibc's allocator.
_CHOSEN = {"LD_PRELOAD", "SAR_ALLOCATOR", "SAR_RESIDENT", "SAR_MEMORY"}
_OPTIONS = {"--workers", "--threads", "--memory", "--resident", "--spill"}


def run(arguments: argparse.Namespace) -> int:
    """Run the script in every worker; return the first exit status that is not 0, or 128 + signal."""
    for name in ("workers", "threads"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name} {given}: expected at least 1.")
    workers = _number_of_workers(arguments)
    if not arguments.script.is_file():
        raise ConfigError(f"there is no file {arguments.script}; expected the training script after the options.")
    settings = _settings(arguments, workers)
    os.environ.update(settings)
    said = " ".join(f"{name}={value}" for name, value in settings.items()) or "environment as it is"
    late = _OPTIONS & {word.partition("=")[0] for word in arguments.script_arguments}
    said += f"; given to the script: {', '.join(sorted(late))}" if late else ""
    print(f"sar launch: {workers} {'workers' if workers > 1 else 'worker'}; {said}", file=sys.stderr)
    if sys.platform == "linux":
        os.environ["SAR_LAUNCHER"] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="sar-launch-") as folder:  # torchrun does not remove its own
        options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={workers}", f"--log-dir={folder}"]
        options.append(f"--max-restarts={arguments.max_restarts}")
        parser = torchrun.get_args_parser()
        parser.allow_abbrev = False  # otherwise it interprets the script's arguments as its options
        asked = parser.parse_args([*options, str(arguments.script), *arguments.script_arguments])
        asked.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # torch before 2.8 handles SIGTERM itself, with status 143
        before = {number: signal.signal(number, partial(_hand_on, arguments.grace)) for number in ENDING}
        try:
            torchrun.run(asked)
        except ChildFailedError as error:  # torchrun has logged it
            _, failure = error.get_first_failure()
            if failure.exitcode == -signal.SIGKILL:
                print("sar launch: a worker was killed (signal 9), as if memory was short", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:  # for example Ctrl-C; the workers have ended
            return 128 + error.sigval
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 0


def _hand_on(grace: float, number: int, _: object) -> None:
    """Forward a signal to the workers and wait for them; unless all exit with status 0, end torchrun."""
    workers = [int(pid) for tasks in Path("/proc/self/task").glob("*/children") for pid in tasks.read_text().split()]
    for pid in workers:
        os.kill(pid, number)
    deadline = time.monotonic() + grace
    how = os.WEXITED | os.WNOWAIT  # leaves the exit status to torchrun
    while not all(ends := [os.waitid(os.P_PID, pid, how | os.WNOHANG) for pid in workers]):
        if time.monotonic() > deadline:
            name = signal.Signals(number).name
            told = f"sar launch: killing workers that have not ended {grace:g} s after {name} (--grace)"
            print(told, file=sys.stderr)
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.05)
    if not ends or any(end is not None and end.si_status for end in ends):
        raise SignalException(f"sar launch got signal {number}", signal.Signals(number))


def _number_of_workers(arguments: argparse.Namespace) -> int:
    if arguments.workers is None and (arguments.memory or arguments.resident) is not None:
        return 1
    if (workers := arguments.workers or torch.cuda.device_count()) > 0:
        return int(workers)
    partitions = _partitions(arguments)
    return 1 if partitions is None else min(partitions.num_parts, len(os.sched_getaffinity(0)))


def _partitions(arguments: argparse.Namespace) -> PartitionJson | None:
    """The partition directory named in the arguments of this command or of the script."""
    if arguments.partition_json is not None:
        return read_partition_json(arguments.partition_json)
    return first_named(arguments.script_arguments)


def _settings(arguments: argparse.Namespace, workers: int) -> dict[str, str]:
    """The environment variables to set: from the command line, and defaults for unset variables."""
    out_of_core = (arguments.memory or arguments.resident) is not None
    if arguments.spill is not None and not out_of_core:
        raise ConfigError("--spill goes with --memory SIZE or --resident 1, before the script.")
    cores = len(os.sched_getaffinity(0))
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // workers)), "GLOO_SOCKET_IFNAME": "lo"}
    settings = {name: value for name, value in defaults.items() if name not in os.environ}
    if arguments.threads is not None:
        settings["OMP_NUM_THREADS"] = str(arguments.threads)
    if arguments.allocator not in (None, "mimalloc"):
        settings["SAR_ALLOCATOR"] = arguments.allocator
    elif arguments.allocator or not (out_of_core or _CHOSEN & os.environ.keys() or left_alone(os.environ)):
        settings |= preloads()
        if "LD_PRELOAD" not in settings:
            if arguments.allocator is not None:
                raise ConfigError("--allocator mimalloc: it is not installed; pip install cmeel-mimalloc.")
            _hint("mimalloc", "sar launch: epochs are shorter with mimalloc: pip install cmeel-mimalloc")
    if out_of_core:
        partitions, folder = _partitions(arguments), arguments.spill
        if folder is None and partitions is None:
            raise ConfigError(
                "--memory and --resident need a folder on a disk for partitions that wait, and no argument of the "
                f"script names an existing directory of partitions, which would do: put --spill DIR before "
                f"{arguments.script}."
            )
        if partitions is not None:
            folder = folder or partitions.path.parent
            if "SAR_PARTS" not in os.environ and partitions.num_parts > 1:
                settings["SAR_PARTS"] = str(partitions.num_parts)
        if not folder.is_dir():
            raise ConfigError(f"--spill {folder}: expected an existing folder on a disk.")
        settings |= {"SAR_RESIDENT": str(arguments.resident or 1), "SAR_SPILL_DIR": str(folder.absolute())}
        settings |= {} if arguments.memory is None else {"SAR_MEMORY": f"{arguments.memory}B"}
        # The workers report errors in these.
        wanted({**os.environ, **settings}, [str(arguments.script), *arguments.script_arguments])
    return settings


def _hint(name: str, text: str) -> None:
    """Print a hint unless this user has seen it before."""
    with suppress(OSError, RuntimeError):  # the cache cannot be written, or there is no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if (folder / f"sar-hint-{name}").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"sar-hint-{name}").touch()
    print(text, file=sys.stderr)
