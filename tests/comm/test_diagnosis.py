"""gloo's messages: only lost connections are told as such."""

from functools import partial

import pytest
import torch.distributed as dist

from sar.comm import process_transport
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from tests.core.attempts import catch, require

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
