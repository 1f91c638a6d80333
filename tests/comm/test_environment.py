"""Which interface workers talk over, by a host's names and routes, and on which GPU each computes.

`test_several_hosts.py` tries interfaces for real."""

import os

import pytest
import torch

from sar.comm import environment
from sar.errors import ConfigError

INTERFACES = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.1.0.1": "eth1"}  # and ib0, which has no address
FROM = {"10.1.0.2": "10.1.0.1", "node2": "10.0.0.1", "node1": "127.0.1.1", "192.0.2.1": "10.0.0.1"}  # to send there


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment on a host, node1, whose own name stands for a loopback address."""

    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(environment, "_interfaces", lambda: INTERFACES)
    monkeypatch.setattr(environment, "_local_end", FROM.get)
    return environ


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("127.0.0.1", "lo"),
        ("localhost", "lo"),
        ("node2", "eth0"),
        ("10.1.0.2", "eth1"),
        ("node1", "eth0"),  # worker 0 is here, by the name under which other hosts know it
        ("nowhere", None),  # left to gloo
        (None, None),
    ],
)
def test_gloo_takes_the_way_to_worker_0(host: dict[str, str], master: str | None, expected: str | None) -> None:
    environment.choose_interface(master)
    assert host.get("GLOO_SOCKET_IFNAME") == expected


def test_without_a_way_to_elsewhere_any_interface_is_better_than_loopback(
    host: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_local_end", {"node1": "127.0.1.1"}.get)
    environment.choose_interface("node1")
    assert host["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment.own_address() == "10.0.0.1"


def test_workers_that_torchrun_starts_on_one_host_keep_to_it(host: dict[str, str]) -> None:
    host.update(LOCAL_WORLD_SIZE="2", WORLD_SIZE="2")
    environment.choose_interface("node1")
    assert host["GLOO_SOCKET_IFNAME"] == "lo"


def test_what_the_user_names_goes_before(host: dict[str, str]) -> None:
    host["GLOO_SOCKET_IFNAME"] = "eth1"
    environment.choose_interface("node2")
    assert host["GLOO_SOCKET_IFNAME"] == "eth1"
    host["SAR_SOCKET_NAME"] = "ib0"
    environment.choose_interface("127.0.0.1")
    assert host["GLOO_SOCKET_IFNAME"] == host["NCCL_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("asked", "local_rank", "there", "taken"),
    [
        ("cuda", 3, 4, 2),  # the script has chosen
        (None, None, 4, 2),  # no launcher
        (None, 3, 4, 3),
        (None, 3, 1, 0),  # Slurm shows each task its own
        ("cuda:1", 3, 4, 1),
        (None, 4, 4, None),
        (None, 1, 0, None),
        ("cuda:1", 3, 1, None),
    ],
)
def test_each_process_takes_its_own_gpu(monkeypatch, asked, local_rank, there, taken) -> None:
    current = [torch.device("cuda", 2)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    if taken is None:
        with pytest.raises(
            ConfigError, match=f"sees {there} of them and is to take number {1 if asked else local_rank}"
        ):
            environment.choose_device(asked, "nccl", local_rank)
        assert len(current) == 1
    else:
        device = environment.choose_device(asked, "nccl", local_rank)
        assert device == current[-1] == torch.device("cuda", taken)
