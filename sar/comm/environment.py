"""The launcher's view of this process (torchrun, Slurm or MPI), and the network interface for its messages.

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

from sar.errors import ConfigError

_LAUNCHERS = (  # variables for a process's rank, the number of processes, both on its own host, and the job's ID
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "", "TORCHELASTIC_RUN_ID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    (
        "Open MPI",
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        "PMIX_NAMESPACE",
    ),
    ("MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class Place(NamedTuple):
    """This process's place in the launcher's job; None for everything that the launcher does not set."""

    launcher: str | None = None
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

    local_rank = next((integer(local) for _, _, _, local, *_ in _LAUNCHERS if local in environ), None)
    for launcher, rank_key, size_key, _, local_size_key, *job_keys in _LAUNCHERS:
        if rank_key not in environ or size_key not in environ:
            continue
        master, job = environ.get("MASTER_ADDR"), None
        if master is None and launcher == "Slurm":
            names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
            nodes = next((environ[name] for name in names if environ.get(name)), None)
            master = None if nodes is None else first_host(nodes)
        elif master is None and environ.get(local_size_key) == environ[size_key]:
            master = "127.0.0.1"
        if job_keys and environ.get(job_keys[0], "none") != "none":  # which is torchrun's default
            job = f"{launcher} {'.'.join(environ.get(key, '') for key in job_keys)}"
        return Place(launcher, integer(rank_key), integer(size_key), local_rank, master, integer("MASTER_PORT"), job)
    return Place(local_rank=local_rank)


def launcher_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the variables for rank, size and master that are set, by any launcher."""
    names = [name for _, rank, size, *_ in _LAUNCHERS for name in (rank, size)]
    return [name for name in (*names, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in environ]


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list, such as `node03` of `node[03-07,12],gpu1`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        raise ConfigError(f"Cannot read the Slurm node list {nodelist!r}; pass master_ip_address.")
    return "".join(part or "" for part in match.groups())


_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1"  # reserved for documentation; connecting a datagram socket sends nothing


def choose_interface(master: str | None) -> None:
    """Set the network interface of gloo and NCCL: see [Note: interfaces].

    This is the user's choice, else loopback if all workers are on this host, else the interface that leads to worker 0.
    """
    name = os.environ.get("SAR_SOCKET_NAME")
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    if name is not None or master is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interfaces: dict[str, str] = {}
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # the interface has no IPv4 address
            interfaces.setdefault(_address_of(name), name)
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    torchrun_is_local = local_size is not None and local_size == os.environ.get("WORLD_SIZE")
    if torchrun_is_local or master.startswith("127.") or master in ("localhost", "::1"):
        address: str | None = "127.0.0.1"
    else:
        address = _local_end(master)
        if address is not None and address.startswith("127."):  # worker 0 is here, but others need not be
            outside = (own for own in interfaces if not own.startswith("127."))
            address = _local_end(_ELSEWHERE) or next(outside, None)
    if address in interfaces:
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces[address]


def own_address() -> str:
    """The address of SAR_SOCKET_NAME's interface, else of the one that leads to other hosts, else loopback."""
    name = os.environ.get("SAR_SOCKET_NAME")
    try:
        return _address_of(name) if name is not None else _local_end(_ELSEWHERE) or "127.0.0.1"
    except OSError as error:
        raise ConfigError(f"SAR_SOCKET_NAME is {name!r}, but there is no such IPv4 interface.") from error


def _local_end(host: str) -> str | None:
    """The address from which this host would send to another; None if there is no route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def _address_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
