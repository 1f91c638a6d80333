"""Who this process is, as told by torchrun, Slurm or MPI, and which network interface it talks over.

[Note: interfaces]
Left to itself, gloo takes the address that the host's name stands for. That is a loopback address on hosts whose own
name is in /etc/hosts as 127.0.1.1, as Debian writes it, and on those whose name nobody knows: then the workers of two
hosts never meet, and the error speaks of refused connections. Where worker 0 is known, the interface that leads to it
is a better choice, because this worker has to reach it anyway.
"""

import ctypes
import fcntl
import os
import re
import signal
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from sar.errors import ConfigError

_LAUNCHERS = (  # with a process's rank, the number of all, and the rank on its host
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_LOCAL_SIZE = {
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MVAPICH": "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPICH or Intel MPI": "MPI_LOCALNRANKS",
}
_PR_SET_PDEATHSIG = 1


class Place(NamedTuple):
    """What a launcher says about this process; `master` is None where it does not say."""

    launcher: str
    rank: int
    world_size: int
    master: str | None
    port: int | None


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Read rank, size and master address from the environment; None where no launcher set them."""
    for launcher, rank_key, size_key, _ in _LAUNCHERS:
        if rank_key in environ and size_key in environ:
            rank, size = _integer(environ, rank_key), _integer(environ, size_key)
            port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
            return Place(launcher, rank, size, _master(launcher, size, environ), port)
    return None


def set_in_part(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The variables by which launchers say who a process is, as far as they are set."""
    pairs = [key for _, *keys, _ in _LAUNCHERS for key in keys]
    return [key for key in (*pairs, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if key in environ]


def job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """What the launcher calls this job: the same in all of its processes, and in no others on these hosts."""
    if environ.get("TORCHELASTIC_RUN_ID", "none") != "none":  # torchrun's default
        return f"torchrun {environ['TORCHELASTIC_RUN_ID']}"
    place = find_place(environ)
    if place is not None and place.launcher == "Slurm" and "SLURM_JOB_ID" in environ:
        return f"Slurm {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    if place is not None and place.launcher == "Open MPI" and "PMIX_NAMESPACE" in environ:
        return f"Open MPI {environ['PMIX_NAMESPACE']}"
    return None


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Have Linux kill this process where `sar launch` is killed and cannot end its workers, which would train on."""
    if environ.get("SAR_LAUNCHER") == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's number on its own host, where a launcher says so."""
    return next((_integer(environ, key) for *_, key in _LAUNCHERS if key in environ), None)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `node[03-07,12],gpu1` gives `node03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodelist)
    if match is None:
        raise ConfigError(f"Cannot read the Slurm node list {nodelist!r}; pass master_ip_address.")
    prefix, ranges, suffix = match.groups()
    first = re.split(r"[-,]", ranges)[0] if ranges else ""
    return f"{prefix}{first}{suffix}"


def _master(launcher: str, size: int, environ: Mapping[str, str]) -> str | None:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if launcher == "Slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else None
    local_size = environ.get(_LOCAL_SIZE.get(launcher, ""))
    return "127.0.0.1" if local_size == str(size) else None


def _integer(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError as error:
        raise ConfigError(f"The environment variable {key} is {environ[key]!r}; expected an integer.") from error


_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1"  # reserved for documentation; connecting a datagram socket sends nothing


def choose_interface(master: str | None) -> None:
    """Name the interface to gloo and NCCL: the user's; else loopback if all are on this host; else see the note."""
    name = os.environ.get("SAR_SOCKET_NAME")
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    elif master is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = _with_address("127.0.0.1", _addresses()) if _on_one_host(master) else _leading_to(master)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def own_address() -> str:
    """The address of SAR_SOCKET_NAME's interface; else of the one that leads to other hosts; else loopback."""
    name = os.environ.get("SAR_SOCKET_NAME")
    if name is None:
        return _local_end(_ELSEWHERE) or "127.0.0.1"
    try:
        return _address_of(name)
    except OSError as error:
        raise ConfigError(f"SAR_SOCKET_NAME is {name!r}, but there is no such IPv4 interface.") from error


def _on_one_host(master: str) -> bool:
    """Whether all workers are on this host, as far as one can tell: by worker 0's address, or by torchrun."""
    sizes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return master.startswith("127.") or master in ("localhost", "::1") or (sizes[0] is not None and len({*sizes}) == 1)


def _leading_to(host: str) -> str | None:
    """The interface to a host; if that is this one by a name for its loopback, the interface to other hosts."""
    address, addresses = _local_end(host), _addresses()
    if address is not None and address.startswith("127."):
        outside = [name for name, own in addresses.items() if not own.startswith("127.")]
        return _with_address(_local_end(_ELSEWHERE), addresses) or next(iter(outside), None)
    return _with_address(address, addresses)


def _local_end(host: str) -> str | None:
    """The address from which this host would send to another; None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _with_address(address: str | None, addresses: dict[str, str]) -> str | None:
    return next((name for name, own in addresses.items() if own == address), None)


def _addresses() -> dict[str, str]:
    """The IPv4 addresses of this host's interfaces, by their names."""
    addresses = {}
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # an interface without one
            addresses[name] = _address_of(name)
    return addresses


def _address_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
