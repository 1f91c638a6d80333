"""Starts processes that set up communication by themselves, as a launcher would."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from tests.python_process import PythonProcess

REPORT = """
import json, os, torch, sar
from sar import comm
total = torch.tensor([sar.rank() + 1.0])
comm.all_reduce(total, torch.distributed.ReduceOp.SUM)
report = {"rank": sar.rank(), "size": sar.world_size(), "sum": total.item(), "backend": comm.backend(),
    "device": str(sar.comm_device()), "ip": comm.master_ip(), "port": comm.master_port()}
os.write(1, f"REPORT {json.dumps(report)}\\n".encode())
"""
"""Code that ends each script: the set-up is proved by a reduction. One write, as processes may share a pipe."""

LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MV2_", "MPI_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    """A port that the kernel does not hand out again soon, as it was just in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launch(code: str, environments: Sequence[Mapping[str, str]], timeout: float = 60) -> list[dict[str, Any]]:
    """Run `code` followed by `REPORT` in one process per environment; return the reports, by process."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    processes = [
        PythonProcess("-c", code + REPORT, env=clean | {"OMP_NUM_THREADS": "1"} | environment, merged=True)
        for environment in environments
    ]
    return finish(processes, timeout)


def finish(processes: Sequence["PythonProcess | subprocess.Popen[str]"], timeout: float) -> list[dict[str, Any]]:
    """Wait for all; kill what overruns; return what each reported."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [json.loads(report) for output in outputs for report in re.findall(r"REPORT (\{[^}]*\})", output)]
