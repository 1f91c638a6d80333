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

_LAUNCHERS = (  # the variables for a process's rank, the number of processes, and both on its own host
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ""),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
    ("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


class Place(NamedTuple):
    """This process's place in the launcher's job. `master` and `port` are None if the launcher does not set them."""

    launcher: str
    rank: int
    world_size: int
    master: str | None
    port: int | None


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Read rank, size and master address from the environment; None if no launcher has set them."""
    for launcher, rank_key, size_key, _, local_size_key in _LAUNCHERS:
        if rank_key not in environ or size_key not in environ:
            continue
        size, master = _integer(environ, size_key), environ.get("MASTER_ADDR")
        if master is None and launcher == "Slurm":
            names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
            nodes = next((environ[name] for name in names if environ.get(name)), None)
            master = None if nodes is None else first_host(nodes)
        elif master is None and environ.get(local_size_key) == str(size):
            master = "127.0.0.1"
        port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
        return Place(launcher, _integer(environ, rank_key), size, master, port)
    return None


def set_in_part(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the launchers' variables for rank, size and master that are set."""
    names = [name for _, rank, size, *_ in _LAUNCHERS for name in (rank, size)]
    return [name for name in (*names, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in environ]


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The launcher's ID of this job: equal in all of its processes, and unique on these hosts. None without one."""
    if environ.get("TORCHELASTIC_RUN_ID", "none") != "none":  # torchrun's default
        return f"torchrun {environ['TORCHELASTIC_RUN_ID']}"
    place = find_place(environ)
    if place is not None and place.launcher == "Slurm" and "SLURM_JOB_ID" in environ:
        return f"Slurm {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    if place is not None and place.launcher == "Open MPI" and "PMIX_NAMESPACE" in environ:
        return f"Open MPI {environ['PMIX_NAMESPACE']}"
    return None


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's index on its host; None if no launcher sets it."""
    return next((_integer(environ, name) for *_, name, _ in _LAUNCHERS if name in environ), None)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list, such as `node03` of `node[03-07,12],gpu1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodelist)
    if match is None:
        raise ConfigError(f"Cannot read the Slurm node list {nodelist!r}; pass master_ip_address.")
    prefix, ranges, suffix = match.groups()
    first = re.split(r"[-,]", ranges)[0] if ranges else ""
    return f"{prefix}{first}{suffix}"


def _integer(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError as error:
        raise ConfigError(f"The environment variable {key} is {environ[key]!r}; expected an integer.") from error


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
    addresses = {}
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # the interface has no IPv4 address
            addresses[name] = _address_of(name)
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    torchrun_is_local = local_size is not None and local_size == os.environ.get("WORLD_SIZE")
    if torchrun_is_local or master.startswith("127.") or master in ("localhost", "::1"):
        address: str | None = "127.0.0.1"
    else:
        address = _local_end(master)
        if address is not None and address.startswith("127."):  # worker 0 is here, but others need not be
            outside = (own for own in addresses.values() if not own.startswith("127."))
            address = _local_end(_ELSEWHERE) or next(outside, None)
    name = next((name for name, own in addresses.items() if own == address), None)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def own_address() -> str:
    """The address of SAR_SOCKET_NAME's interface, else of the one that leads to other hosts, else loopback."""
    name = os.environ.get("SAR_SOCKET_NAME")
    if name is None:
        return _local_end(_ELSEWHERE) or "127.0.0.1"
    try:
        return _address_of(name)
    except OSError as error:
        raise ConfigError(f"SAR_SOCKET_NAME is {name!r}, but there is no such IPv4 interface.") from error


def _local_end(host: str) -> str | None:
    """The address from which this host would send to another; None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
