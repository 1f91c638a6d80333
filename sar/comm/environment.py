"""The launcher's view of this process (torchrun, Slurm or MPI), and the device and network interface for its messages.

[Note: interfaces]
By default gloo resolves the host's name to choose its address. This is a loopback address on hosts whose name is in
/etc/hosts as 127.0.1.1, as on Debian, and on hosts whose name cannot be resolved. Then workers of two hosts cannot
connect, and the error is about refused connections. If worker 0's address is known, the interface that leads to it is a
better choice, because this worker has to reach it anyway.
"""

import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from sar.errors import ConfigError

_LAUNCHERS = {  # variables for a process's rank, the number of processes, both on its own host, and the job's ID
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    "Open MPI": (
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        "PMIX_NAMESPACE",
    ),
    "MVAPICH": tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


class Place(NamedTuple):
    """This process's place in the launcher's job; None for everything that the launcher does not set."""

    launcher: str | None = None  # "incomplete" if only some of a launcher's variables are set
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None  # among the processes of this host
    master: str | None = None
    port: int | None = None
    job: str | None = None  # equal in all processes of the job, and unique on these hosts


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Read this process's place from the environment. Without both rank and size, it has at most a local rank."""

    def integer(key: str) -> int | None:
        try:
            return int(environ[key]) if key in environ else None
        except ValueError as error:
            raise ConfigError(f"The environment variable {key} is {environ[key]!r}; expected an integer.") from error

    local_rank = next((integer(local) for _, _, local, *_ in _LAUNCHERS.values() if local in environ), None)
    for launcher, (rank_key, size_key, _, local_size_key, *job_keys) in _LAUNCHERS.items():
        if rank_key in environ and size_key in environ:
            master, job = environ.get("MASTER_ADDR"), None
            if master is None and launcher == "Slurm":
                nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
                master = None if nodes is None else first_host(nodes)
            elif master is None and environ.get(local_size_key) == environ[size_key]:
                master = "127.0.0.1"
            if job_keys and environ.get(job_keys[0], "none") != "none":  # which is torchrun's default
                job = f"{launcher} {'.'.join(environ.get(key, '') for key in job_keys)}"
            return Place(
                launcher, integer(rank_key), integer(size_key), local_rank, master, integer("MASTER_PORT"), job
            )
    names = {name for rank_key, size_key, *_ in _LAUNCHERS.values() for name in (rank_key, size_key)}
    some = not environ.keys().isdisjoint(names | {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})
    return Place("incomplete" if some else None, local_rank=local_rank)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list, such as `node03` of `node[03-07,12],gpu1`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        raise ConfigError(f"Cannot read the Slurm node list {nodelist!r}; pass master_ip_address.")
    return "".join(part or "" for part in match.groups())


def choose_device(device: torch.device | str | None, backend: str, local_rank: int | None) -> torch.device:
    """The device of tensors that travel. A CUDA device becomes the current one.

    This is the device asked for, else for nccl the one with the local rank, else the current one. Under Slurm each
    process may see one device only, which has index 0 in all of them.
    """
    asked = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
    if (asked.type == "cuda") != (backend == "nccl"):
        raise ConfigError(f"Tensors cannot travel on {asked} with backend {backend}; leave _comm_device out.")
    if asked.type != "cuda":
        return asked
    count, number = torch.cuda.device_count(), asked.index
    if number is None and device is None and local_rank is not None:
        number = 0 if count == 1 else local_rank
    if count == 0 or (number is not None and number >= count):
        raise ConfigError(
            f"nccl needs a CUDA device for each worker, but this process sees {count} of them and is to take number "
            f"{number or 0}. Start as many workers on a host as it has GPUs, or take gloo: there workers may share one."
        )
    chosen = torch.device("cuda", torch.cuda.current_device() if number is None else number)
    torch.cuda.set_device(chosen)
    return chosen


_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1"  # reserved for documentation; connecting a datagram socket sends nothing


def choose_interface(master: str | None) -> None:
    """Set the network interface of gloo and NCCL: see [Note: interfaces].

    This is the user's choice, else loopback if all workers are on this host, else the interface that leads to worker 0.
    """
    if name := os.environ.get("SAR_SOCKET_NAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    elif master is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "")
        if one_host or master.startswith("127.") or master in ("localhost", "::1"):
            address: str | None = "127.0.0.1"
        elif (address := _local_end(master)) is not None and address.startswith("127."):
            address = own_address()  # worker 0 is here, but others need not be
        if address in (names := _interfaces()):
            os.environ["GLOO_SOCKET_IFNAME"] = names[address]


def own_address() -> str:
    """The address of SAR_SOCKET_NAME's interface, else of the default route, else of any interface but loopback."""
    names, chosen = _interfaces(), os.environ.get("SAR_SOCKET_NAME")
    if chosen:
        for address, name in names.items():
            if name == chosen:
                return address
        raise ConfigError(f"SAR_SOCKET_NAME is {chosen!r}, but there is no such IPv4 interface.")
    other = min(names, key=lambda address: address.startswith("127."), default="127.0.0.1")
    return _local_end(_ELSEWHERE) or other


def _interfaces() -> dict[str, str]:
    """Names of this host's network interfaces by their IPv4 addresses."""
    interfaces: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                interfaces.setdefault(socket.inet_ntoa(answer[20:24]), name)
    return interfaces


def _local_end(host: str) -> str | None:
    """The address from which this host would send to another; None if there is no route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None
