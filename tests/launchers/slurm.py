"""A Slurm cluster of two nodes, n1 and n2, on this machine: a controller, two `slurmd`, and munge between them.

All of it lives in namespaces that end with the command, so nothing listens outside, and nothing is left behind. Needs
Linux, root, iproute2, and Debian's packages slurm-wlm and munge.
"""

import os
import shutil
import sys
from pathlib import Path

from benchmarks.network import obstacle
from tests.launchers.training import output_of
from tests.workers import REPOSITORY

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
AuthType=auth/munge
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4 State=UNKNOWN
PartitionName=p Nodes=n[1-2] Default=YES State=UP
"""

START = """
set -e
mount -t tmpfs tmpfs /run
mkdir -m 711 /run/munge
ip link set lo up
ip link add eth0 type bridge
ip address add 10.0.0.1/24 dev eth0
ip link set eth0 up
hostname localhost
mount --bind "$CLUSTER/hosts" /etc/hosts
cd "$CLUSTER"
munged --force --key-file=munge.key --pid-file="$PWD/m.pid" --log-file="$PWD/m.log" --seed-file="$PWD/m.seed"
slurmctld
slurmd -N n1
slurmd -N n2
for try in $(seq 100); do
    [ "$(sinfo --noheader --states idle --format %D)" != 2 ] || break
    sleep 0.2
done
cd ..
"""


def why_no_slurm() -> str | None:
    """Why there can be no cluster here; None where there can."""
    missing = [program for program in ("slurmctld", "slurmd", "munged") if shutil.which(program) is None]
    return f"there is no {missing[0]}: apt-get install slurm-wlm munge" if missing else obstacle()


def on_cluster(script: str, folder: Path, limit: float, hosts: str = "10.0.0.1 n1 n2") -> str:
    """What a script of bash prints that runs in `folder` beside the cluster; `hosts` are lines of /etc/hosts."""
    cluster, programs = folder / "cluster", folder / "bin"
    for made in (cluster, programs, cluster / "state"):
        made.mkdir()
    (cluster / "slurm.conf").write_text(CONFIGURATION.format(folder=cluster))
    (cluster / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}\n")
    (cluster / "munge.key").touch(0o400)
    (cluster / "munge.key").write_bytes(os.urandom(1024))
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "SAR_SOCKET"))}
    environment |= {"CLUSTER": str(cluster), "SLURM_CONF": str(cluster / "slurm.conf"), "PYTHONPATH": str(REPOSITORY)}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}:/usr/sbin"
    spaces = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return output_of([*spaces, "bash", "-c", START + script], folder, environment, limit)
