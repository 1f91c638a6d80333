"""Workers of one job come together; those of others, or of other versions, hear why not."""

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import sar
from sar.comm import joining, liveness, session
from sar.comm.environment import find_place
from sar.comm.joining import connect_store, host_store, sign_in
from sar.errors import CommunicationError, CommunicationTimeout, ConfigError
from tests.comm.launch import free_port, launch
from tests.python_process import PythonProcess


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(sar.Config, "timeout", 5.0)
    monkeypatch.setattr(joining, "HEARD_SECONDS", 0.5)


def joined(workers, store=None, pause=0.0):
    """Let workers check in, each in a thread: what each returned or raised. `workers` are (rank, world size, job)."""
    store = store or dist.HashStore()

    def join(worker):
        threading.current_thread().name = f"worker {worker[0]}"
        try:
            return sign_in(store, *worker)
        except (CommunicationError, ConfigError) as error:
            return error

    with ThreadPoolExecutor(len(workers)) as executor:
        running = []
        for worker in workers:
            running.append(executor.submit(join, worker))
            time.sleep(pause)
        return [one.result(20) for one in running]


@pytest.mark.parametrize("job", [None, "a"])
def test_one_job(job):
    stores = joined([(2, 3, job), (0, 3, job), (1, 3, job)])
    stores[0].set("greeting", "hello")
    assert stores[1].get("greeting") == stores[2].get("greeting") == b"hello"


def test_another_job_is_refused_and_the_first_goes_on():
    """Worker 1 of another job finds this one's store, before this one's own worker 1 does."""
    first, stranger, second = joined([(0, 2, "a"), (1, 2, "b"), (1, 2, "a")], pause=0.3)
    first.set("greeting", "hello")
    assert second.get("greeting") == b"hello"
    assert type(stranger) is CommunicationError
    for words in ("Worker 1 of 2 of job b", "worker 0 of 2 of job a", "SAR_JOB_ID"):
        assert words.lower() in str(stranger).lower()


def test_who_is_missing_is_told_while_the_others_wait(monkeypatch, caplog):
    monkeypatch.setattr(sar.Config, "timeout", 3.0)
    monkeypatch.setattr(joining, "HEARD_SECONDS", 0.0)
    monkeypatch.setattr(liveness, "STALL_SECONDS", 0.5)
    assert [type(error) for error in joined([(0, 4, None), (1, 4, None)])] == [CommunicationTimeout] * 2
    for rank in (0, 1):
        said = [line for line in caplog.messages if re.match(rf"Worker {rank} of 4 .* has waited \d+ s for", line)]
        assert 1 <= len(said) <= 3, caplog.messages
        assert all("for worker 2, worker 3 to join" in line for line in said)


def test_that_worker_0_is_missing_is_told_while_the_others_wait(monkeypatch, caplog):
    monkeypatch.setattr(sar.Config, "timeout", 3.0)
    monkeypatch.setattr(liveness, "STALL_SECONDS", 0.5)
    with pytest.raises(CommunicationTimeout, match=r"Worker 3 waited 3 s .* \(Connection refused\)"):
        sar.initialize_comms(3, 4, "127.0.0.1", "gloo", None, free_port())
    said = [line for line in caplog.messages if re.match(r"Worker 3 has waited \d s for the job's", line)]
    assert 1 <= len(said) <= 3, caplog.messages


FROZEN = """
import os, signal, sys, sar
from sar.comm import liveness, joining
rank, port, others = map(int, sys.argv[1:])
liveness.SILENCE_SECONDS = 2.0
ask = joining.BoundedStore.ask
def ask_or_freeze(table, question):
    if ask(table, lambda store: store.check([str(k) for k in range(1, 1 + others)])):
        print("frozen", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return ask(table, question)
if rank == 0:
    joining.BoundedStore.ask = ask_or_freeze
sar.initialize_comms(rank, 3, "127.0.0.1", master_port_number=port)
"""


@pytest.mark.parametrize(
    ("others", "told"),
    [(0, "The job's store at 127.0.0.1:.* has not answered"), (1, "Worker 1 of 3 .* has not heard of the job's store")],
    ids=["before they connect", "after they have signed"],
)
def test_a_worker_0_that_freezes_while_others_join(others, told):
    port = free_port()
    workers = [PythonProcess("-c", FROZEN, 0, port, others, merged=True)]
    try:
        if others == 0:
            assert "frozen" in workers[0].line()
        workers.append(PythonProcess("-c", FROZEN, 1, port, others, merged=True))
        said = workers[1].communicate(timeout=60)[0]
        assert workers[1].returncode == 1
        assert re.search(f"CommunicationTimeout: {told}", said), said
        assert "usually worker 0, is frozen" in said, said
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_rank_can_be_had_once():
    """Two jobs on one port that nobody named: all that is known is that there are two workers 1."""
    errors = joined([(0, 3, None), (1, 3, None), (1, 3, None)])
    for error in errors:
        assert type(error) is CommunicationError, error
        assert re.search(r"Worker 1 of 3 .* comes after Worker 1 of 3", str(error)), error


def test_who_comes_once_the_job_is_complete_raises_alone():
    first, second, late = joined([(0, 2, None), (1, 2, None), (1, 2, None)], pause=0.5)
    first.set("greeting", "hello")
    assert second.get("greeting") == b"hello"
    assert re.search(r"Worker 1 of 2 .* comes after Worker 1 of 2", str(late)), late


@pytest.mark.parametrize("attempt", range(4))
def test_all_workers_follow_one_verdict_whatever_comes_first(attempt):
    """The second worker 1 comes at about the same time as worker 2, with which the job is complete."""
    workers = [(0, 3, None), (1, 3, None), (2, 3, None), (1, 3, None)]
    found = joined(workers[attempt:] + workers[:attempt])
    errors = [one for one in found if isinstance(one, Exception)]
    assert len(errors) in (1, 4), errors
    assert all(re.search(r"Worker 1 of 3 .* comes after Worker 1 of 3", str(error)) for error in errors), errors


def test_world_sizes_differ():
    errors = joined([(0, 2, None), (1, 3, None)])
    for error in errors:
        assert isinstance(error, CommunicationError | ConfigError)
        assert "Worker 0 of 2" in str(error)
        assert "Worker 1 of 3" in str(error)


@pytest.mark.parametrize("name", ["sar", "torch", "dgl"])
def test_versions_differ(monkeypatch, name):
    def of_this_thread():
        return {"sar": "1", "torch": "2", name: "9" if threading.current_thread().name == "worker 1" else "8"}

    monkeypatch.setattr(joining, "imported_versions", of_this_thread)
    for error in joined([(0, 3, "a"), (1, 3, "a"), (2, 3, "a")]):
        assert type(error) is ConfigError
        assert f"different versions of {name}" in str(error)
        for rank, version in enumerate("898"):
            assert re.search(rf"worker {rank} \(.*\): {version}", str(error))


def test_dgl_imported_on_some_workers_only(monkeypatch):
    def of_this_thread():
        return {"torch": "2"} | ({"dgl": "1"} if threading.current_thread().name == "worker 1" else {})

    monkeypatch.setattr(joining, "imported_versions", of_this_thread)
    assert not any(isinstance(found, Exception) for found in joined([(0, 2, "a"), (1, 2, "a")]))


def test_builds_of_one_version_are_alike(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.4.0+cu121")
    assert joining.imported_versions()["torch"] == "2.4.0"
    assert joining.imported_versions()["sar"] == sar.__version__


def test_restarts_on_the_same_store(monkeypatch):
    """torchrun's agent may keep the store: the signatures of workers before the restart are not believed."""
    store = dist.HashStore()
    assert not any(isinstance(found, Exception) for found in joined([(0, 2, "a"), (1, 2, "a")], store))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    late = joined([(1, 2, "a"), (0, 2, "a")], store, pause=0.3)  # worker 1 comes before the new worker 0
    late[0].set("greeting", "hello")
    assert late[1].get("greeting") == b"hello"


@pytest.mark.parametrize(
    "environ, job",
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x7"}, "torchrun x7"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "31", "SLURM_STEP_ID": "4"}, "Slurm 31.4"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "n@1"}, "Open MPI n@1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, None),
    ],
)
def test_what_a_launcher_calls_the_job(environ, job):
    assert find_place(environ).job == job


def listening(port):
    """Addresses on which a port of this host is open, as the kernel writes them."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel lists sockets elsewhere")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_store_listens_on_the_address_asked_for(host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6")
    port = free_port()
    store = host_store(host, port)
    assert listening(port) == {"0100007F" if host != "::1" else "00000000000000000000000001000000"}
    other = connect_store(host, port, 5.0)
    other.set("greeting", "hello")
    assert store.get("greeting") == b"hello"


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import sar
try:
    sar.initialize_comms(0, 2, "127.0.0.1", master_port_number={server.getsockname()[1]})
except sar.errors.CommunicationError as error:
    assert "in use" in str(error) and "port is free" in str(error), error
    print('REPORT {{"raised": true}}')
    raise SystemExit
"""
        assert launch(code, [{}]) == [{"raised": True}]


def test_jobs_with_different_ids_on_one_port():
    """Job b's worker 1 finds the store of job a, whose own worker 1 comes later."""
    code = f"""
import os, time, sar
sar.Config.timeout = 30
name, rank = os.environ["WHO"].split()
os.environ["SAR_JOB_ID"] = name
time.sleep(float(os.environ["LATER"]))
try:
    sar.initialize_comms(int(rank), 2, "127.0.0.1", master_port_number={free_port()})
except sar.errors.CommunicationError as error:
    assert "job a" in str(error) and "job b" in str(error), error
    print('REPORT {{"refused": "' + name + '"}}')
    raise SystemExit
"""
    environments = [{"WHO": "a 0", "LATER": "0"}, {"WHO": "b 1", "LATER": "0"}, {"WHO": "a 1", "LATER": "2"}]
    first, refused, second = launch(code, environments)
    assert refused == {"refused": "b"}
    assert [first["sum"], second["sum"]] == [3.0, 3.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_stands_for_no_address(rank, monkeypatch):
    monkeypatch.setattr(session, "RESOLVE_SECONDS", 0.0)
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
    monkeypatch.setattr(session, "connect_store", connect)
    with pytest.raises(CommunicationError, match="the name is known"):
        sar.initialize_comms(1, 2, "late.example", "gloo")
    assert len(asked) == 3
