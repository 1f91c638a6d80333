"""`initialize_comms` from arguments and from launchers' environments, and its errors."""

import os
import re
import subprocess
import sys

import pytest

import sar
from sar import comm
from sar.comm.environment import find_place, first_host
from sar.errors import ConfigError
from tests.comm.launch import REPORT, finish, free_port, launch
from tests.core.attempts import Failure, catch
from tests.python_process import run
from tests.workers import REPOSITORY


def assert_connected(reports, size=2):
    assert [report["size"] for report in reports] == [size] * size
    assert sorted(report["rank"] for report in reports) == list(range(size))
    assert [report["sum"] for report in reports] == [size * (size + 1) / 2] * size
    assert {report["backend"] for report in reports} == {"gloo"}
    assert {report["device"] for report in reports} == {"cpu"}


def test_arguments():
    port = free_port()
    code = f"import os, sar; sar.initialize_comms(int(os.environ['MINE']), 2, '127.0.0.1', 'gloo', None, {port})"
    reports = launch(code, [{"MINE": "0"}, {"MINE": "1"}])
    assert_connected(reports)
    assert {(report["ip"], report["port"]) for report in reports} == {("127.0.0.1", port)}


LAUNCHERS = {
    "torchrun": {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"},
    "Slurm": {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"},
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": "{port}",
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_environment_variables(launcher):
    """Slurm says nothing of a port, so it is given."""
    port = free_port()
    environments = [
        {name: value.format(rank=rank, port=port) for name, value in LAUNCHERS[launcher].items()} for rank in range(2)
    ]
    arguments = f"master_port_number={port}" if launcher == "Slurm" else ""
    code = f"import sar; sar.initialize_comms({arguments})"
    if launcher == "torchrun":  # whose agent would host the store
        code = "import os; os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'\n" + code
    assert_connected(launch(code, environments))


def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sar; sar.initialize_comms()\n{REPORT}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    assert_connected(finish([process], timeout=90))


@pytest.mark.slow
def test_torchrun_restarts(tmp_path):
    """In the first attempt worker 1 dies once it is connected; in the second all go through."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, signal, sar
sar.initialize_comms()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and sar.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
{REPORT}
""")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.5"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    assert_connected(finish([process], timeout=120))


@pytest.mark.parametrize(
    "environ, rank, size, master, port",
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "7"}, 1, 4, "h", 7),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "n[04-07,9],m"}, 2, 3, "n04", None),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 0, 2, None, None),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, 3, 4, "127.0.0.1", None),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1", "MASTER_ADDR": "h"}, 0, 1, "h", None),
    ],
)
def test_find_place(environ, rank, size, master, port):
    place = find_place(environ)
    assert (place.rank, place.world_size, place.master, place.port) == (rank, size, master, port)


def test_no_launcher_and_garbled_variables():
    assert find_place({"RANK": "1"}).rank is None, "torchrun sets both"
    with pytest.raises(ConfigError, match="RANK is 'one'"):
        find_place({"RANK": "one", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    "nodelist, host",
    [
        ("localhost", "localhost"),
        ("a1,a2", "a1"),
        ("gpu[12-15]", "gpu12"),
        ("node[003,007-9]", "node003"),
        ("r[1-2]c3,x", "r1c3"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"_world_size": 2}, ["_rank", "master_ip_address", "torchrun"]),
        ({"_rank": 0}, ["_world_size", "master_ip_address"]),
        ({"_rank": 0, "_world_size": 2}, ["master_ip_address"]),
        ({"_rank": 1, "_world_size": 1}, ["Rank 1", "world size 1"]),
        ({"_rank": 2, "_world_size": 2, "master_ip_address": "127.0.0.1"}, ["Rank 2", "2"]),
        ({"_rank": 0, "_world_size": 1, "backend": "carrier pigeon"}, ["carrier pigeon", "gloo"]),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(arguments, words, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError) as error:
        sar.initialize_comms(**arguments)
    for word in words:
        assert word in str(error.value)
    assert not comm.is_initialized()


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_NTASKS", "PMI_RANK"])
def test_an_environment_that_is_set_in_part(variable, monkeypatch):
    """Somebody meant to start several workers, so one that goes on alone would be wrong."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"needs _rank, _world_size.*of which only {variable} is set"):
        sar.initialize_comms()
    assert not comm.is_initialized()


TRAIN = """
import contextlib, socket, torch, dgl, sar
other = socket.socket()
with contextlib.suppress(OSError):  # another job has the port
    other.bind(("127.0.0.1", 12345))
sar.logging_setup("INFO")
sar.initialize_comms()
graph = dgl.rand_graph(20, 80)
graph.ndata["x"] = torch.rand(20, 3)
sar.partition_graph(graph, "g", 3, "parts")
data = sar.load_dgl_partition_data("parts/g.json", sar.rank(), "cpu")
here = sar.construct_full_graph(data)
layer = dgl.nn.SAGEConv(3, 2, "mean")
order = data["orig_id"]
torch.testing.assert_close(layer(here, data["x"]), layer(graph, graph.ndata["x"])[order])
assert here.num_nodes() == 20
assert sar.comm.master_port() != 12345
"""


def test_a_script_without_a_launcher(tmp_path):
    """`python train.py`, on a directory of several partitions."""
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "NUMBA_CACHE_DIR") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = "no launcher and no arguments: a group of one worker (threads: 1); `sar launch --workers W`"
    assert done.stderr.count(said) == 1


def again():
    """On a worker whose process group was there before sar."""
    sar.initialize_comms()
    sar.initialize_comms(sar.rank(), sar.world_size(), backend="gloo")
    failures = [
        catch(lambda: sar.initialize_comms(_rank=sar.rank() + 1)),
        catch(lambda: sar.initialize_comms(_world_size=9)),
        catch(lambda: sar.initialize_comms(backend="nccl")),
    ]
    known = comm.is_initialized(), sar.rank(), sar.world_size(), comm.backend(), str(sar.comm_device())
    return failures, known, (comm.master_ip(), comm.master_port())


@pytest.mark.parametrize("world_size", [2])
def test_an_existing_process_group_is_used(pool):
    for rank, (failures, known, master) in enumerate(pool.run(again)):
        for failure, word in zip(failures, ("rank", "world size", "backend"), strict=True):
            assert isinstance(failure, Failure)
            assert failure.kind == "ConfigError"
            assert word in failure.message
        assert known == (True, rank, 2, "gloo", "cpu")
        assert master == (None, None)


def test_a_master_that_does_not_answer():
    code = f"""
import sar
sar.Config.timeout = 2
try:
    sar.initialize_comms(1, 2, "127.0.0.1", master_port_number={free_port()})
except sar.errors.CommunicationError as error:
    assert "127.0.0.1" in str(error) and "worker 0" in str(error), error
    print('REPORT {{"raised": true}}')
    raise SystemExit
"""
    assert launch(code, [{}]) == [{"raised": True}]


WAITS = """
import logging, sys
import sar
from sar.comm import liveness
liveness.STALL_SECONDS = 0.5
sar.Config.timeout = 3
if "configured" in sys.argv:
    logging.basicConfig(filename="log")
sar.initialize_comms()
"""


@pytest.mark.parametrize("logging", ["as it is", "configured"])
def test_a_worker_that_waits_for_another_says_so(tmp_path, logging):
    """On standard error, without any set-up of logging; with one, where that says."""
    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run("-c", WAITS, logging, timeout=60, cwd=tmp_path, env=os.environ | place)
    assert done.returncode == 1
    told = done.stderr if logging == "as it is" else (tmp_path / "log").read_text()
    assert re.search(r"orker 0 of 2 .* has waited \d s for worker 1", told), done.stderr
    assert ("has waited" in done.stderr) == (logging == "as it is")
