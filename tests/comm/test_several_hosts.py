"""Training over hosts that share nothing but a network, with the commands of docs/howto/several-hosts.md.

A host is a network namespace, with a folder of its own under the same path, its own name, and an /etc/hosts in which
that name stands for a loopback address, as Debian writes it. `ssh` and `scp` are small programs that go between these
folders. All is made inside namespaces that end with the processes; needs Linux, root and iproute2.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.network import obstacle
from sar.adapters.dgl.shim import require_dgl
from tests.pages.blocks import runs_of
from tests.pages.files import dgl as graph_file
from tests.workers import REPOSITORY

PAGE = REPOSITORY / "docs" / "howto" / "several-hosts.md"
HOSTS = ("node1", "node2")

CONNECT = """
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add hub type bridge
ip link set hub up
for n in 1 2; do
    ip netns add node$n
    ip link add cable$n type veth peer name eth0 netns node$n
    ip link set cable$n master hub up
    ip -n node$n address add 10.0.0.$n/24 dev eth0
    ip -n node$n link set eth0 up
    ip -n node$n link set lo up
    ip netns exec node$n sysctl -q -w net.ipv4.ip_local_port_range="40000 40999"
done
"""

ON_HOST = """#!/bin/sh
# on_host NAME COMMAND: in the namespace and the folder of that host
exec ip netns exec $1 unshare --mount --uts sh -e -c '
    hostname $1
    mount --bind ROOT/$1.hosts /etc/hosts
    mount --bind ROOT/$1 ROOT/home
    cd ROOT/home
    eval "$2"' on_host "$@"
"""

SSH = '#!/bin/sh\nhost=$1\nshift\nexec on_host $host "$*"\n'
SCP = """#!/bin/sh -e
# as scp, from or to a host's folder
from= to=
for word; do from="$from $to"; to=$word; done
[ "${from# *-r}" = "$from" ] || from=${from# *-r}
place() { case $1 in *:*) echo "ROOT/${1%%:*}/${1#*:}";; *) echo "$1";; esac; }
for word in $from; do cp -r "$(place $word)" "$(place $to)"; done
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two hosts' folders, and the programs that go from one to the other."""
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    programs = {"on_host": ON_HOST, "ssh": SSH, "scp": SCP}
    for name, module in (("python", ""), ("sar", "-m sar.cli"), ("torchrun", "-m torch.distributed.run")):
        programs[name] = f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n'
    for folder in ("bin", "here", "home", *HOSTS):
        (tmp_path / folder).mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text.replace("ROOT", str(tmp_path)))
        (tmp_path / "bin" / name).chmod(0o755)
    for own, other, address in (("node1", "node2", "10.0.0.2"), ("node2", "node1", "10.0.0.1")):
        (tmp_path / f"{own}.hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{address} {other}\n")
    return tmp_path


def at(place: str) -> list[str]:
    """The commands of the page that are for this place."""
    blocks = [block for run in runs_of(PAGE, PAGE.read_text()) for block in run.blocks if block.language == "sh"]
    return [block.code for block in blocks if block.code.startswith(f"# {place}\n")]


@pytest.mark.slow
def test_two_hosts_without_a_shared_file_system(root: Path) -> None:
    graph_file(root / "here")
    [script] = [b.code for run in runs_of(PAGE, PAGE.read_text()) for b in run.blocks if b.title == "train.py"]
    ports = "print([line.split()[1] for line in open('/proc/net/tcp') if line.split()[3] == '0A'])\n"
    (root / "here" / "train.py").write_text(script + ports)
    before, after = at("where the graph is")
    jobs = [f"on_host {host} '{at(f'on {host}')[0]}' > {root}/{host}.log 2>&1 &\n{host}=$!\n" for host in HOSTS]
    started = "".join([*jobs, *(f"wait ${host}\n" for host in HOSTS)])
    lines = f"set -e\n{CONNECT}cd {root}/here\n{before}\n{started}\n{after}"
    environment = os.environ | {
        "PATH": f"{root}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("GLOO_SOCKET_IFNAME", "SAR_SOCKET_NAME"):
        environment.pop(name, None)
    done = subprocess.run(
        ["unshare", "--mount", "--net", "timeout", "150", "bash", "-c", lines],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    logs = {host: (root / f"{host}.log").read_text() for host in HOSTS if (root / f"{host}.log").exists()}
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"

    # Neither host has the other's part, and what one file of results says is what the workers have printed.
    assert [sorted(p.name for p in (root / host / "partitions/graph").glob("part*")) for host in HOSTS] == [
        ["part0"],
        ["part1"],
    ]
    [graph], _ = require_dgl().load_graphs(str(root / "here" / "graph.dgl"))
    right = np.load(root / "here" / "logits.npy").argmax(1) == graph.ndata["label"].numpy()
    accuracy = right[graph.ndata["test_mask"].bool().numpy()].mean()
    assert f"test accuracy {accuracy:.4f}" in logs["node1"]
    assert (root / "node1" / "model.pt").exists()

    # What listens where, as the page says: gloo on eth0, in the range.
    for host, address in zip(HOSTS, ("0100000A", "0200000A"), strict=True):
        [listening] = re.findall(r"^\[('[0-9A-F:, ']+)\]$", logs[host], re.MULTILINE)
        found = [place.strip("' ").split(":") for place in listening.split(",")]
        assert len(found) == 2
        assert all(own == address and 40000 <= int(port, 16) <= 40999 for own, port in found), found
