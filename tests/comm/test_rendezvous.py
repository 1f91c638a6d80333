"""`nfs_ip_init`: workers find worker 0 through a shared file, and do not believe an old one."""

import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import sar
from sar.comm import setup, store
from sar.errors import CommunicationTimeout, ConfigError
from tests.comm.launch import free_port, launch


@pytest.fixture(autouse=True)
def short_and_tidy(monkeypatch):
    monkeypatch.setattr(sar.Config, "timeout", 40.0)
    yield
    setup.stop_announcing()


def waiting_worker(path):
    """A worker 1 that waits in a thread."""
    executor = ThreadPoolExecutor(1)
    result = executor.submit(sar.nfs_ip_init, 1, str(path))
    executor.shutdown(wait=False)
    return result


@pytest.fixture
def talking_port():
    """The port of a service that talks, which took over the port of a run that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"220 mail.example.org ESMTP ready for you\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


OLD = ["127.0.0.1 {closed} 0123456789abcdef\n", "127.0.0.1 {talking} 0123456789abcdef\n"]


@pytest.mark.parametrize("content", [None, *OLD, "", "10.0.0.1\n", "a b c", "127.0.0.1 99999999 abc"], ids=range(7))
def test_a_stale_file_is_not_believed(tmp_path, talking_port, content):
    path = tmp_path / "ip"
    if content is not None:
        path.write_text(content.format(closed=free_port(), talking=talking_port))
    early = waiting_worker(path)
    time.sleep(1)
    assert not early.done(), "took what the old file says"
    address = sar.nfs_ip_init(0, str(path))
    assert socket.inet_aton(address)
    assert early.result(40) == sar.nfs_ip_init(2, str(path)) == address


def test_nobody_announces(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sar.Config, "timeout", 2.0)
    monkeypatch.setattr(store, "REPORT_SECONDS", 0.3)
    path = tmp_path / "ip"
    with pytest.raises(CommunicationTimeout, match=r"\(No such file or directory\)") as error:
        sar.nfs_ip_init(1, str(path))
    assert str(path) in str(error.value)
    assert "waited 2 s" in str(error.value)
    path.write_text(OLD[0].format(closed=free_port()))
    assert any(re.match(r"Worker 1 has waited \d s for worker 0 to announce", line) for line in caplog.messages)
    with pytest.raises(CommunicationTimeout, match=r"an old file does not count \(Connection refused\)"):
        sar.nfs_ip_init(1, str(path))


@pytest.mark.parametrize("name", ["folder", "missing/ip", "file/ip"])
def test_a_file_that_cannot_be_written(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write its address"):
        sar.nfs_ip_init(0, str(tmp_path / name))
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_two_runs_at_the_same_time(tmp_path):
    """Each has its own file, one of which was there before; the set-up goes through to a reduction."""
    code = """
import os, sar
me = int(os.environ["MINE"])
sar.Config.timeout = 30
sar.initialize_comms(me, 2, sar.nfs_ip_init(me, os.environ["IP_FILE"]))
"""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(OLD[0].format(closed=free_port()))
    environments = [{"MINE": str(rank), "IP_FILE": str(path)} for path in (first, second) for rank in (1, 0)]
    reports = launch(code, environments)
    used = [report["port"] for report in reports]
    assert used[0] == used[1] != used[2] == used[3], "a port for each run"
    assert [report["sum"] for report in reports] == [3.0] * 4
    assert os.listdir(tmp_path) == [], "the files are gone once everybody is connected"
