"""Objects come out of a channel as they went in, in memory of their own or in memory that receivers share."""

import os
from multiprocessing.connection import Pipe
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sar.sampling.batch_memory import receive, send


class Message(NamedTuple):
    name: str
    tensors: dict[str, Tensor]


@pytest.fixture
def message():
    return Message(
        "all sorts",
        {
            "many": torch.arange(600_000),
            "half": torch.arange(6).bfloat16().view(2, 3),
            "flags": torch.tensor([True, False, True]),
            "transposed": torch.arange(12.0).view(3, 4).t(),
            "every second": torch.arange(10)[::2],
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "no rows": torch.empty(0, 7),
            "parameter": torch.ones(3, requires_grad=True),
            "no rows at the end": torch.empty(0, 7, dtype=torch.complex128),
        },
    )


@pytest.mark.parametrize("mapped", [False, True])
def test_message_comes_out_as_it_went_in(message, mapped):
    ours, theirs = Pipe()
    opened = len(os.listdir("/proc/self/fd"))
    send(message, ours)
    found = receive(theirs, mapped=mapped)
    assert found.name == message.name
    assert found.tensors.keys() == message.tensors.keys()
    for name, tensor in message.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), name
    assert len(os.listdir("/proc/self/fd")) == opened


def test_copies_and_mapped_tensors_are_the_receivers_own(message):
    ours, theirs = Pipe()
    for mapped in (False, True):
        send(message, ours, ours)
        first, second = (receive(theirs, mapped=mapped) for _ in range(2))
        first.tensors["many"].zero_()
        assert torch.equal(second.tensors["many"], message.tensors["many"])


def test_end_of_the_other_process():
    ours, theirs = Pipe()
    theirs.close()
    send([torch.ones(3)], ours)
    with pytest.raises((EOFError, OSError)):
        receive(ours)
