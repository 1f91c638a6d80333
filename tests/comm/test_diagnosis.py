"""gloo's messages: only lost connections are told as such; and calls under another default device of torch."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import sar
from sar import comm
from sar.comm import process_transport
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from tests.core.attempts import catch, require
from tests.parity.harness import assert_close, build, deal, random_data
from tests.parity.programs import weighted
from tests.parity.scenarios import SCENARIOS


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
        (f"{GLOO}Read error [::1]:5: Connection timed out. This is", "PeerError", ": Connection timed out", "600"),
        (f"{GLOO}Read error [::1]:5: No route to host. This is", "PeerError", "the network is gone", "600"),
        (f"{GLOO}Connection closed by peer [::1]:5. This", "PeerError", "(Connection closed by peer [::1]:5)", "600"),
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
