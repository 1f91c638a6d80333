"""Errors that a worker makes by itself are told as such; only lost connections are told as lost connections."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import sar
from sar import comm
from sar.comm import process_transport
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from tests.core.attempts import catch, catch_and_recover, require
from tests.parity.harness import assert_close, build, deal, random_data
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS


def reduce_small_integers():
    comm.all_reduce(torch.ones(2, dtype=torch.int16))


def reduce_by_bits():
    comm.all_reduce(torch.ones(2), dist.ReduceOp.BAND)


def send_two_dtypes():
    comm.exchange_tensors([torch.ones(2), torch.ones(3, dtype=torch.float64 if sar.rank() else None)])


def send_two_widths():
    comm.exchange_tensors([torch.ones(2, 2), torch.ones(3, 2 + sar.rank())])


def receive_another_dtype():
    other = 1 - sar.rank()
    comm.exchange_single_tensor(other, other, torch.empty(2), torch.ones(1, dtype=torch.float64))


def go_wrong(program):
    failure = catch_and_recover(program)
    total = torch.ones(1)
    comm.all_reduce(total)
    return failure, total.item()


@pytest.mark.parametrize(
    "program, culprits, kind, words",
    [
        (reduce_small_integers, [0, 1], "ConfigError", "int16"),
        (reduce_by_bits, [0, 1], "ConfigError", "BAND"),
        (send_two_dtypes, [1], "ConfigError", "float64[3] among tensors with rows like float32[0]"),
        (send_two_widths, [1], "ConfigError", "float32[3, 3] among tensors with rows like float32[0, 2]"),
        (receive_another_dtype, [0, 1], "ConfigError", "float32"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_what_a_worker_does_wrong_is_not_the_death_of_another(pool, program, culprits, kind, words):
    for rank, (failure, total) in enumerate(pool.run(go_wrong, program)):
        assert words in require(failure).message
        assert "died" not in failure.message
        assert failure.kind == (kind if rank in culprits else "PeerError")
        assert total == 2


def with_another_default_device(mine):
    partition, data = mine
    graph = build(partition, 1)
    total = torch.ones(3)
    sent = [torch.full((2,), 10.0 * sar.rank() + reader) for reader in range(sar.world_size())]
    torch.set_default_device("meta")
    try:
        comm.all_reduce(total)
        received = comm.exchange_tensors(sent)
        x = data.leaf("x")
        out = weighted(graph, x, data.edges["w"])
        out.sum().backward()
    finally:
        torch.set_default_device("cpu")
    return total, received, out.detach(), x.grad


@pytest.mark.parametrize("world_size", [2])
def test_another_default_device(pool):
    """Agreements, and what calls need besides, do not follow torch's default device."""
    parts = SCENARIOS["random"](2)
    data = random_data(parts, torch.float64)
    results = pool.run(with_another_default_device, per_rank=deal(parts, data))
    x = data.leaf("x")
    expected = weighted(parts.reference(), x, data.edges["w"])
    expected.sum().backward()
    for rank, (total, received, _, _) in enumerate(results):
        assert torch.equal(total, torch.full((3,), 2.0))
        assert [tensor[0].item() for tensor in received] == [rank, 10.0 + rank]
    assert_close(torch.cat([out for _, _, out, _ in results]), expected.detach())
    assert_close(torch.cat([grad for *_, grad in results]), x.grad)


GLOO = "[/gloo/transport/tcp/pair.cc:537] "


class Unconnected(ProcessTransport):
    """A transport whose connections are not needed."""

    def connect(self, group, limit):
        pass


@pytest.mark.parametrize(
    "text, kind, words, absent",
    [
        (
            f"{GLOO}Read error [10.0.0.1]:5: Connection timed out. This is",
            "PeerError",
            ": Connection timed out",
            "600",
        ),
        (f"{GLOO}Read error [::1]:5: No route to host. This is", "PeerError", "the network is gone", "600"),
        (
            f"{GLOO}Connection closed by peer [::1]:5. This is",
            "PeerError",
            "(Connection closed by peer [::1]:5)",
            "600",
        ),
        (f"{GLOO}Timed out waiting 600000ms for recv", "CommunicationTimeout", "600 s (Config.timeout)", "died"),
        ("[enforce fail at /gloo/x.cc:1] sizes differ", "RuntimeError", "sizes differ", "died"),
    ],
)
def test_the_words_of_gloo(monkeypatch, text, kind, words, absent):
    monkeypatch.setattr(process_transport, "PATIENCE", 0)
    group = Group(Unconnected(dist.HashStore(), 0, 2))

    def operation():
        raise RuntimeError(text)

    failure = require(catch(partial(group.wait_for, peer=1), operation, "all_reduce"))
    assert failure.kind == kind
    assert words in failure.message
    assert absent not in failure.message.replace(text, "")
