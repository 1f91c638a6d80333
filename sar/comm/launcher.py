"""Who this process is, as told by torchrun, Slurm or MPI."""

import ctypes
import os
import re
import signal
from collections.abc import Mapping
from typing import NamedTuple

from sar.errors import ConfigError

_RANK_AND_SIZE = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
)
_LOCAL_SIZE = {
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MVAPICH": "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPICH or Intel MPI": "MPI_LOCALNRANKS",
}
_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)


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
    for launcher, rank_key, size_key in _RANK_AND_SIZE:
        if rank_key in environ and size_key in environ:
            rank, size = _integer(environ, rank_key), _integer(environ, size_key)
            port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
            return Place(launcher, rank, size, _master(launcher, size, environ), port)
    return None


def set_in_part(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The variables by which launchers say who a process is, as far as they are set."""
    pairs = [key for _, *keys in _RANK_AND_SIZE for key in keys]
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
    return next((_integer(environ, key) for key in _LOCAL_RANK if key in environ), None)


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
