"""Workers of one job come together; those of others, or of other versions, hear why not."""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import sar
from sar.comm import setup
from sar.comm.setup import agree_on_job, connect_store, host_store
from sar.errors import CommunicationError, CommunicationTimeout
from tests.comm.launch import free_port, launch
from tests.python_process import PythonProcess


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(sar.Config, "timeout", 20.0)
    monkeypatch.setattr(setup, "HEARD_SECONDS", 0.0)


def joined(workers, store=None):
    """Join workers (rank, world size, job), each in a thread; return what each returned or raised."""
    store = store or dist.HashStore()

    def join(worker):
        threading.current_thread().name = f"worker {worker[0]}"
        try:
            return agree_on_job(store, *worker, {"size": worker[1]})
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(len(workers)) as executor:
        return list(executor.map(join, workers))


def assert_meet(stores):
    """All workers have joined, and have one store."""
    stores[0].set("greeting", "hello")
    assert [store.get("greeting") for store in stores] == [b"hello"] * len(stores)


@pytest.mark.parametrize("job", [None, "a"])
def test_one_job(job):
    assert_meet(joined([(2, 3, job), (0, 3, job), (1, 3, job)]))


def test_another_job_is_refused_and_the_first_goes_on():
    """Worker 1 of another job finds this one's store, perhaps before this one's own worker 1 does."""
    *job, stranger = joined([(0, 2, "a"), (1, 2, "a"), (1, 2, "b")])
    assert_meet(job)
    assert type(stranger) is CommunicationError
    for words in ("Worker 1 of 2 of job b", "Worker 0 of 2 of job a", "SAR_JOB_ID"):
        assert words in str(stranger)


def test_who_is_missing_is_told_while_the_others_wait(monkeypatch, caplog):
    monkeypatch.setattr(sar.Config, "timeout", 3.0)
    monkeypatch.setattr(setup, "REPORT_SECONDS", 0.5)
    for rank, error in enumerate(joined([(0, 4, None), (1, 4, None)])):
        assert type(error) is CommunicationTimeout
        assert "for worker 2, worker 3 to join" in str(error)
        said = [line for line in caplog.messages if re.match(rf"Worker {rank} has waited \d+ s for", line)]
        assert 1 <= len(said) <= 3, caplog.messages
        assert "for worker 2, worker 3 to join" in said[-1]


def test_that_worker_0_is_missing_is_told_while_the_others_wait(monkeypatch, caplog):
    monkeypatch.setattr(sar.Config, "timeout", 3.0)
    monkeypatch.setattr(setup, "REPORT_SECONDS", 0.5)
    with pytest.raises(CommunicationTimeout, match=r"Worker 3 waited 3 s .*worker 0.* \(Connection refused\)"):
        sar.initialize_comms(3, 4, "127.0.0.1", "gloo", None, free_port())
    said = [line for line in caplog.messages if re.match(r"Worker 3 has waited \d s for the job's", line)]
    assert 1 <= len(said) <= 3, caplog.messages


FROZEN = """
import os, signal, sys, sar
from sar.comm import setup
rank, port, others = map(int, sys.argv[1:])
sar.Config.timeout = 6.0
def freeze(*arguments):
    print("frozen", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 0 and others:
    setup.dist.init_process_group = freeze
elif rank == 0:
    setup.agree_on_job = freeze
sar.initialize_comms(rank, 2 if others else 3, "127.0.0.1", master_port_number=port)
"""


@pytest.mark.parametrize("others", [0, 1], ids=["before they connect", "after they have signed"])
def test_a_worker_0_that_freezes_while_others_join(others):
    port = free_port()
    workers = [PythonProcess("-c", FROZEN, 0, port, others, merged=True)]
    try:
        if others == 0:
            assert "frozen" in workers[0].line()
        workers.append(PythonProcess("-c", FROZEN, 1, port, others, merged=True))
        said = workers[1].communicate(timeout=60)[0]
        assert workers[1].returncode == 1
        assert re.search(r"Worker 1 .* 127\.0\.0\.1.*", said), said
        assert others or "usually worker 0, is frozen" in said, said
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def assert_clash(error, *words):
    assert type(error) is CommunicationError, error
    for word in ("do not go together", *words):
        assert word in str(error)


def test_who_comes_once_the_job_is_complete_raises_alone():
    store = dist.HashStore()
    job = joined([(0, 3, None), (1, 3, None), (2, 3, None)], store)
    [late] = joined([(1, 3, None)], store)
    assert_meet(job)
    assert_clash(late, "rank: Worker 1 of 3")


@pytest.mark.parametrize("first", range(4))
def test_all_workers_follow_one_verdict_whatever_comes_first(first):
    """Two jobs on one port that nobody named: all that is known is that there are two workers 1."""
    workers = [(0, 3, None), (1, 3, None), (2, 3, None), (1, 3, None)]
    found = joined(workers[first:] + workers[:first])
    errors = [one for one in found if isinstance(one, Exception)]
    assert len(errors) in (1, 4), errors
    for error in errors:
        assert_clash(error, "rank: Worker 1 of 3")


def test_world_sizes_differ():
    for error in joined([(0, 2, None), (1, 3, None)]):
        assert_clash(error, "size: 3 of Worker 1 of 3", "2 of Worker 0 of 2")


def test_versions_differ(monkeypatch):
    def of_this_thread():
        return {"torch": "9" if threading.current_thread().name == "worker 1" else "8", "sar": "1"}

    monkeypatch.setattr(setup, "imported_versions", of_this_thread)
    for error in joined([(0, 3, "a"), (1, 3, "a"), (2, 3, "a")]):
        assert_clash(error, "torch: 9 of Worker 1 of 3", "8 of Worker 0 of 3")


def test_dgl_imported_on_some_workers_only(monkeypatch):
    def of_this_thread():
        return {"torch": "2"} | ({"dgl": "1"} if threading.current_thread().name == "worker 1" else {})

    monkeypatch.setattr(setup, "imported_versions", of_this_thread)
    assert_meet(joined([(0, 2, "a"), (1, 2, "a")]))


def test_builds_of_one_version_are_alike(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.4.0+cu121")
    assert setup.imported_versions()["version of torch"] == "2.4.0"
    assert setup.imported_versions()["version of sar"] == sar.__version__


def test_restarts_on_the_same_store(monkeypatch):
    """torchrun's agent may keep the store: the signatures of workers before the restart are not believed."""
    store = dist.HashStore()
    for restart in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        assert_meet(joined([(1, 2, "a"), (0, 2, "a")], store))


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


def test_jobs_with_different_ids_on_one_port(tmp_path):
    """Job b's worker 1 finds the store of job a, whose own worker 1 comes later."""
    code = f"""
import os, time, sar
sar.Config.timeout = 40
os.environ["SAR_JOB_ID"], rank = os.environ["WHO"].split()
while os.environ["WHO"] == "a 1" and not os.path.exists("refused"):
    time.sleep(0.05)
try:
    sar.initialize_comms(int(rank), 2, "127.0.0.1", master_port_number={free_port()})
except sar.errors.CommunicationError as error:
    assert "job a" in str(error) and "job b" in str(error), error
    open("refused", "w").close()
    print('REPORT {{"refused": "' + os.environ["WHO"] + '"}}')
    raise SystemExit
"""
    code = f"import os; os.chdir({str(tmp_path)!r})\n{code}"
    first, refused, second = launch(code, [{"WHO": "a 0"}, {"WHO": "b 1"}, {"WHO": "a 1"}])
    assert refused == {"refused": "b 1"}
    assert [first["sum"], second["sum"]] == [3.0, 3.0]


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
