"""Workers of one job come together; those of others, or of other versions, hear why not."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import sar
from sar.comm import setup, store
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from sar.comm.setup import connect_store, host_store
from sar.errors import CommunicationError, CommunicationTimeout
from tests.comm.launch import free_port, launch
from tests.python_process import PythonProcess


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(sar.Config, "timeout", 20.0)


def in_threads(function, workers):
    """What a function returns or raises for each worker, in a thread of its own."""

    def run(worker):
        try:
            return function(*worker)
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(len(workers)) as executor:
        return list(executor.map(run, workers))


def join(workers):
    """Let workers (rank, world size) of one job connect and agree; return the flags that each got, or its error."""
    store = dist.HashStore()
    return in_threads(lambda rank, size: Group(ProcessTransport(store, rank, size)).agree("a call", rank), workers)


@pytest.mark.parametrize("workers", [[(0, 2), (1, 3)], [(0, 3), (1, 2)]])
def test_numbers_of_workers_differ(workers):
    for error in join(workers):
        assert isinstance(error, CommunicationError), error
        assert "does not fit Worker" in str(error)
        assert "the same world size" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_worker_of_a_rank_is_refused_and_the_job_goes_on(rank):
    results = join([(0, 2), (1, 2), (rank, 2)])
    [error] = [result for result in results if isinstance(result, CommunicationError)]
    assert f"Worker {rank} of 2" in str(error)
    assert f"does not fit Worker {rank} of 2" in str(error)
    assert sum(result == [0, 1] for result in results) == 2


TWO_JOBS = """
import os, sar
sar.Config.timeout = float(os.environ["LIMIT"])
try:
    sar.initialize_comms(int(os.environ["MINE"]), 2, "127.0.0.1", master_port_number=int(os.environ["PORT"]))
except sar.errors.CommunicationTimeout:  # none of its job has come, or the other one has ended
    print('REPORT {"raised": true}')
    raise SystemExit
"""


def test_a_worker_of_another_job_waits_for_its_own_and_this_job_goes_on():
    port = str(free_port())
    jobs = [("0", "a", "60"), ("1", "b", "5"), ("1", "a", "60")]
    environments = [{"MINE": rank, "SAR_JOB_ID": job, "LIMIT": limit, "PORT": port} for rank, job, limit in jobs]
    first, stranger, second = launch(TWO_JOBS, environments)
    assert (first["sum"], stranger, second["sum"]) == (3.0, {"raised": True}, 3.0)


def test_that_worker_0_is_missing_is_told_while_the_others_wait(monkeypatch, caplog):
    monkeypatch.setattr(sar.Config, "timeout", 3.0)
    monkeypatch.setattr(store, "REPORT_SECONDS", 0.5)
    with pytest.raises(CommunicationTimeout, match=r"Worker 3 waited 3 s .*worker 0.* \(Connection refused\)"):
        sar.initialize_comms(3, 4, "127.0.0.1", "gloo", None, free_port())
    said = [line for line in caplog.messages if re.match(r"Worker 3 has waited \d s for the job's", line)]
    assert 1 <= len(said) <= 3, caplog.messages


FROZEN = """
import os, signal, sys, sar
from sar.comm import setup
rank, port = map(int, sys.argv[1:])
sar.Config.timeout = 8.0
def freeze(*arguments):
    print("frozen", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 0:
    setup.ProcessTransport = freeze
sar.initialize_comms(rank, 2, "127.0.0.1", master_port_number=port)
"""


def test_a_worker_0_that_freezes_while_others_join():
    port = free_port()
    workers = [PythonProcess("-c", FROZEN, 0, port, merged=True)]
    try:
        assert "frozen" in workers[0].line()
        workers.append(PythonProcess("-c", FROZEN, 1, port, merged=True))
        said = workers[1].communicate(timeout=60)[0]
        assert workers[1].returncode == 1
        assert re.search(r"Worker 1 waited .* worker 0.*usually worker 0, is frozen", said), said
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


DIFFERENT = """
import os, sar
from sar.comm import setup
rank = int(os.environ["MINE"])
setup.torch.__version__ = f"2.{rank}"
try:
    sar.initialize_comms(rank, 2, "127.0.0.1", master_port_number=int(os.environ["PORT"]))
except sar.errors.DisagreementError as error:
    assert "worker 0: initialize_comms over gloo, with sar" in str(error), error
    assert "torch 2.0" in str(error) and "torch 2.1" in str(error), error
    print('REPORT {"raised": true}')
    raise SystemExit
"""


def test_versions_differ():
    port = str(free_port())
    assert launch(DIFFERENT, [{"MINE": str(rank), "PORT": port} for rank in range(2)]) == [{"raised": True}] * 2


def listening(port):
    """Addresses on which a port of this host is open, as the kernel writes them."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel lists sockets elsewhere")
@pytest.mark.parametrize(
    "host, addresses",
    [
        ("127.0.0.1", {"0100007F"}),
        ("localhost", {"0100007F"}),
        ("::1", {"00000000000000000000000001000000"}),
        (socket.gethostname(), {"00000000", "0" * 32}),  # a name may stand for another address elsewhere
    ],
)
def test_the_store_listens_on_the_address_asked_for(host, addresses):
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    port = free_port()
    store = host_store(host, port)
    assert listening(port)
    assert listening(port) <= addresses
    other = connect_store(host, port)
    other.set("greeting", "hello")
    assert store.get("greeting") == b"hello"


def test_a_port_that_is_taken():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(CommunicationError, match=r"in use.*the port is free"),
    ):
        sar.initialize_comms(0, 2, "127.0.0.1", "gloo", None, server.getsockname()[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_stands_for_no_address(rank, monkeypatch):
    monkeypatch.setattr(setup, "RESOLVE_SECONDS", 0.0)
    with pytest.raises(CommunicationError, match=r"worker 0's host, 'nowhere\.invalid', .*MASTER_ADDR.*/etc/hosts"):
        sar.initialize_comms(rank, 2, "nowhere.invalid", "gloo")


def test_a_name_may_be_known_late(monkeypatch):
    known, asked = socket.getaddrinfo, []

    def late(*arguments):
        asked.append(arguments)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "not yet")
        return known("127.0.0.1", None)

    def connect(*arguments):
        raise CommunicationError("the name is known")

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(setup, "connect_store", connect)
    with pytest.raises(CommunicationError, match="the name is known"):
        sar.initialize_comms(1, 2, "late.example", "gloo")
    assert len(asked) == 3
