"""DistDGL on one machine: servers and trainers over loopback, where 127.0.0.1, 127.0.0.2, ... pass for machines.

    python examples/distdgl_cluster.py --partition-json partitions/cora/cora.json examples/distdgl_then_full_eval.py

starts a machine for each partition; what follows the script is passed on to it. The script is as for a real cluster,
with one more line, `import distdgl_cluster`, before it initialises DGL. It finds the file for `DistGraph` in the
environment: DGL_IP_CONFIG for `dgl.distributed.initialize`, DGL_CONF_PATH for the partitions. Linux only.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

MACHINE, PREFIX = "DISTDGL_MACHINE", "DISTDGL_PREFIX"
"""Environment variables of every process of a cluster: its machine, and what its shared memory's names begin with."""

SHARED_MEMORY = Path("/dev/shm")
GRACE = 20.0
"""Seconds that servers get to leave once the trainers have."""


Processes = dict[str, "subprocess.Popen[bytes]"]


class ClusterError(RuntimeError):
    """A process failed, or the time was up; says which, with the end of the servers' output."""


class Usage(NamedTuple):
    """Peak resident memory of the servers and of the trainers, in bytes; shared memory counts in each."""

    servers: list[int]
    trainers: list[int]


def run_cluster(
    script: Sequence[str],
    partition_json: Path,
    *,
    trainers: int = 1,
    samplers: int = 0,
    threads: int = 1,
    time_limit: float = 600,
    quiet: bool = False,
) -> Usage:
    """Run a script on every trainer of a cluster, with one server on each machine.

    Args:
        script: the file and its arguments, or -m and a module.
        partition_json: the JSON file of a partition directory.
        trainers: on each machine.
        samplers: processes that sample for each trainer.
        threads: of each process.
        time_limit: seconds after which all processes are killed.
        quiet: show what the trainers print only when something fails, as it is with the servers.

    Returns:
        Memory at the peak.

    Raises:
        ClusterError: a process failed or the time was up; no process is left then either.
    """
    machines = int(json.loads(partition_json.read_text())["num_parts"])
    prefix = f"distdgl-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="distdgl-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        stack.callback(_remove_shared_memory, prefix)
        settings = _settings(folder, partition_json, machines, trainers, samplers, threads)
        servers: Processes = {}
        clients: Processes = {}
        stack.callback(lambda: _kill([*servers.values(), *clients.values()]))
        for machine in range(machines):
            here = settings | {MACHINE: str(machine), PREFIX: f"{prefix}-{machine}-"}
            role = here | {"DGL_ROLE": "server", "DGL_SERVER_ID": str(machine)}
            servers[f"server {machine}"] = _start([__file__, "--serve"], role, folder / f"server-{machine}.log")
            for local_rank in range(trainers):
                rank = machine * trainers + local_rank
                role = here | {"DGL_ROLE": "client", "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                clients[f"trainer {rank}"] = _start(script, role, folder / f"trainer-{rank}.log" if quiet else None)
        try:
            return _wait(servers, clients, time_limit)
        except ClusterError as error:
            logs = [f"--- {log.stem}\n{log.read_text(errors='replace')[-2000:]}" for log in folder.glob("*.log")]
            raise ClusterError("\n".join([str(error), *sorted(logs)])) from None


def _settings(
    folder: Path, partition_json: Path, machines: int, trainers: int, samplers: int, threads: int
) -> dict[str, str]:
    """The environment that all processes share."""
    addresses = [f"127.0.0.{machine + 1}" for machine in range(machines)]
    ip_config = folder / "ip_config.txt"
    places = zip(addresses, _free_ports(addresses), strict=True)
    ip_config.write_text("".join(f"{address} {port}\n" for address, port in places))
    [master_port] = _free_ports(addresses[:1])
    settings = {
        "DGL_DIST_MODE": "distributed",
        "DGL_IP_CONFIG": ip_config,
        "DGL_CONF_PATH": partition_json.resolve(),
        "DGL_GRAPH_FORMAT": "csc",
        "DGL_KEEP_ALIVE": 0,
        "DGL_NUM_SERVER": 1,
        "DGL_NUM_SAMPLER": samplers,
        "DGL_NUM_CLIENT": machines * trainers * (1 + samplers),
        "DGL_DIST_MAX_TRY_TIMES": 40,  # by default a trainer tries for an hour
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": master_port,
        "WORLD_SIZE": machines * trainers,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
    }
    return os.environ | {name: str(value) for name, value in settings.items()}


def _free_ports(addresses: Sequence[str]) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in addresses]
        for one, address in zip(sockets, addresses, strict=True):
            one.bind((address, 0))
        return [one.getsockname()[1] for one in sockets]


def _start(command: Sequence[str], environment: dict[str, str], log: Path | None) -> "subprocess.Popen[bytes]":
    """Start a process in a group of its own, which its samplers belong to as well."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _wait(servers: Processes, trainers: Processes, time_limit: float) -> Usage:
    """Wait until all have ended well."""
    deadline = time.monotonic() + time_limit
    peaks = dict.fromkeys(trainers | servers, 0)
    running = trainers | servers
    while running:
        for name, process in list(running.items()):
            peaks[name] = max(peaks[name], _peak_memory(process.pid))
            if process.poll() is not None:
                del running[name]
                if process.returncode != 0:
                    raise ClusterError(f"The {name} ended with status {process.returncode}.")
                if not running.keys() & trainers.keys():
                    deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            raise ClusterError(f"The {', '.join(running)} did not end in time.")
        time.sleep(0.05)
    return Usage([peaks[name] for name in servers], [peaks[name] for name in trainers])


def _peak_memory(pid: int) -> int:
    """Bytes that were resident at most so far; 0 of a process that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _kill(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _remove_shared_memory(prefix: str) -> None:
    """What killed servers leave behind."""
    for file in SHARED_MEMORY.glob(f"{prefix}*"):
        file.unlink(missing_ok=True)


# -- in the processes of a cluster


def _pretend(machine: int, prefix: str) -> None:
    """Make DGL take this process for one of another machine than its neighbours."""
    import sar  # noqa: F401  # isort: skip  (before dgl)
    import dgl.distributed
    from dgl import DGLGraph, heterograph_index

    # It compares addresses, and all of 127.0.0.x are this host's: every trainer would land on the first machine.
    dgl.distributed.rpc_client.get_local_machine_id = lambda namebook: machine

    def named_apart(function: Callable[..., Any], argument: int = 0) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            name = re.sub("^/?", lambda slash: slash[0] + prefix, args[argument])
            return function(*args[:argument], name, *args[argument + 1 :], **kwargs)

        return call

    # The names of shared memory do not tell machines apart either: servers would overwrite each other's features.
    for module in [module for name, module in sys.modules.items() if name.startswith("dgl.distributed")]:
        for name in ("empty_shared_mem", "exist_shared_mem_array"):
            if hasattr(module, name):
                setattr(module, name, named_apart(getattr(module, name)))
    index = heterograph_index
    index.create_heterograph_from_shared_memory = named_apart(index.create_heterograph_from_shared_memory)
    DGLGraph.shared_memory = named_apart(DGLGraph.shared_memory, argument=1)


def _end_at_once(kind: type[BaseException], error: BaseException, trace: Any) -> NoReturn:
    """End a process that raised: DGL's exit handler would wait for all others, which wait for this one."""
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    sys.stdout.flush()
    os._exit(1)


def _end_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition-json", type=Path, required=True, help="the JSON file of a partition directory")
    parser.add_argument("--trainers", type=int, default=1, help="on each machine (%(default)s)")
    parser.add_argument("--samplers", type=int, default=0, help="for each trainer (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds (%(default)s)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        import dgl.distributed

        dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])  # serves, and exits when the trainers have left
    options = vars(_parse())
    try:
        run_cluster(options.pop("script"), options.pop("partition_json"), **options)
    except ClusterError as error:
        sys.exit(str(error))


if MACHINE in os.environ:
    _end_with_parent()
    sys.excepthook = _end_at_once
    _pretend(int(os.environ[MACHINE]), os.environ[PREFIX])

if __name__ == "__main__":
    main()
