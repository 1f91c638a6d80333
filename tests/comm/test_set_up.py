"""`initialize_comms` from arguments and from launchers' environments, and its errors."""

import os
import subprocess
import sys

import pytest

import sar
from sar import comm
from sar.comm.environment import Place, find_place, first_host
from tests.comm.launch import REPORT, finish, free_port, launch
from tests.core.attempts import Failure, catch
from tests.workers import REPOSITORY


def assert_connected(reports, size=2):
    assert [report["size"] for report in reports] == [size] * size
    assert sorted(report["rank"] for report in reports) == list(range(size))
    assert [report["sum"] for report in reports] == [size * (size + 1) / 2] * size
    assert {report["backend"] for report in reports} == {"gloo"}
    assert {report["device"] for report in reports} == {"cpu"}


STARTS = {  # `test_torchrun` starts by variables only
    "arguments": {"MINE": "{rank}"},
    "Slurm": {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1"},  # without a port
}
ARGUMENTS = {
    "arguments": "int(os.environ['MINE']), 2, '127.0.0.1', 'gloo', None, {port}",
    "Slurm": "master_port_number={port}",
}


@pytest.mark.parametrize("start", STARTS)
def test_arguments_and_environment_variables(start):
    port = free_port()
    environments = [
        {name: value.format(rank=rank, port=port) for name, value in STARTS[start].items()} for rank in range(2)
    ]
    code = f"import os, sar; sar.initialize_comms({ARGUMENTS[start].format(port=port)})"
    reports = launch(code, environments)
    assert_connected(reports)
    assert {(report["ip"], report["port"]) for report in reports} == {("127.0.0.1", port)}


TORCHRUN = f"""
import os, signal, sar
sar.initialize_comms()
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) and sar.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
{REPORT}
"""


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_torchrun(tmp_path, restarts):
    """With a restart, worker 1 dies in the first attempt once it is connected; in the second all go through."""
    (tmp_path / "script.py").write_text(TORCHRUN)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--monitor-interval", "0.5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "script.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    assert_connected(finish([process], timeout=120))


@pytest.mark.parametrize(
    "environ, place",
    [
        ({}, Place()),
        ({"RANK": "1"}, Place("incomplete")),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "none"},
            Place("torchrun", 1, 4, None, "h", 7),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x7"},
            Place("torchrun", 0, 2, 0, job="torchrun x7"),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "n[04-07,9],m", "SLURM_JOB_ID": "31"}
            | {"SLURM_STEP_ID": "4"},
            Place("Slurm", 2, 3, None, "n04", job="Slurm 31.4"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "n@1"},
            Place("Open MPI", 0, 2, job="Open MPI n@1"),
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"},
            Place("MPICH or Intel MPI", 3, 4, None, "127.0.0.1"),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1", "MASTER_ADDR": "h"},
            Place("MVAPICH", 0, 1, None, "h"),
        ),
    ],
)
def test_find_place(environ, place):
    assert find_place(environ) == place


def test_first_host_of_a_slurm_list():
    lists = {"localhost": "localhost", "a1,a2": "a1", "gpu[12-15]": "gpu12", "r[1-2]c3,x": "r1c3"}
    assert {nodelist: first_host(nodelist) for nodelist in lists} == lists


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
