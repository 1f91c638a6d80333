"""Collectives on whole tensors, and the errors where workers ask for different things."""

import pytest
import torch
import torch.distributed as dist

import sar
from sar import comm
from sar.comm.session import current_group
from sar.comm.transport import HEAD_BYTES
from sar.nn.statistics import global_sum
from tests.core.attempts import Failure, catch_and_recover
from tests.matrix import corner


def reduce_a_transposed_parameter():
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    comm.all_reduce(parameter.data.t(), dist.ReduceOp.SUM)
    return parameter.detach()


@pytest.mark.parametrize("world_size", [2])
def test_all_reduce_is_in_place_on_strided_tensors(pool):
    for result in pool.run(reduce_a_transposed_parameter):
        assert torch.equal(result, 2 * torch.arange(6.0).reshape(2, 3))


def exchanged(x):
    return torch.cat(comm.exchange_tensors([x] * sar.world_size()))


def all_exchanged(x):
    arrived = [torch.zeros_like(x) for _ in range(sar.world_size())]
    comm.all_to_all(arrived, [x] * sar.world_size())
    return torch.cat(arrived)


def passed_on(x):
    arrived, size = torch.zeros_like(x), sar.world_size()
    comm.exchange_single_tensor((sar.rank() - 1) % size, (sar.rank() + 1) % size, arrived, x)
    return arrived


def reduced(x):
    op = dist.ReduceOp.SUM if x.is_complex() else dist.ReduceOp.MAX
    comm.all_reduce(x, op)
    return x


def summed(x):
    return global_sum(x.real if x.is_complex() else x)  # gloo gathers no complex numbers


CALLS = [exchanged, all_exchanged, passed_on, summed, sar.all_sum, reduced]


def same_as_of_copies():
    """Conjugate and negative views, of which a copy has the numbers that they show, unlike the memory they share."""
    z = torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0) * (3 - 2 * sar.rank())).reshape(3, 2)
    for call in CALLS:
        for view in (z.clone().conj(), z.clone().conj().imag):
            assert view.is_conj() or view.is_neg()
            expected = call(view.clone())
            assert torch.equal(call(view), expected), (call.__name__, view.dtype)


@pytest.mark.parametrize("world_size", [2])
def test_views_travel_as_they_show(pool, world_size):
    pool.run(same_as_of_copies)


def parcel(sender, receiver, dtype=torch.float32):
    """What one worker sends to another: of a length, and with contents, that tell the pair."""
    return torch.full((sender + 2 * receiver, 2), 10.0 * sender + receiver, dtype=dtype)


def exchange(way, dtype):
    rank, size = sar.rank(), sar.world_size()
    sent = [parcel(rank, receiver, dtype) for receiver in range(size)]
    if way == "in place":
        received = [torch.empty_like(parcel(sender, rank, dtype)) for sender in range(size)]
        comm.all_to_all(received, sent, move_to_comm_device=True)
        return received
    return comm.exchange_tensors(
        sent, [rank * 2 + sender for sender in range(size)] if way == "of known sizes" else None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("way", ["of any size", "of known sizes", "in place"])
@pytest.mark.parametrize("world_size", [1, 2, 3, corner(4)])
def test_exchange_tensors(pool, world_size, way, dtype):
    for rank, received in enumerate(pool.run(exchange, way, dtype)):
        assert len(received) == world_size
        for sender, tensor in enumerate(received):
            assert torch.equal(tensor, parcel(sender, rank, dtype))


def message(sender, receiver):
    """Bytes that tell the pair and begin with their number, which is below, at or above what one message holds."""
    nbytes = HEAD_BYTES + [-8, 0, 8, 16 - HEAD_BYTES, 2 * HEAD_BYTES][(sender + 2 * receiver) % 5]
    words = torch.arange(nbytes // 8) * 100 + 10 * sender + receiver
    words[0] = nbytes
    return words.view(torch.uint8)


def exchange_messages():
    me, size = current_group(), sar.world_size()
    with me.guard():
        me.agree("messages")
        before = comm.statistics()
        received = me.exchange("messages", [message(me.rank, reader) for reader in range(size)])
        return received, (comm.statistics() - before).bytes_received


@pytest.mark.parametrize("world_size", [1, 2, 3, corner(5)])
def test_messages_that_tell_their_length(pool, world_size):
    for rank, (received, count) in enumerate(pool.run(exchange_messages)):
        for sender, content in enumerate(received):
            assert torch.equal(content, message(sender, rank))
        assert count == sum(map(len, received)) - len(received[rank])


def pass_around(step):
    rank, size = sar.rank(), sar.world_size()
    source, reader = (rank - step) % size, (rank + step) % size
    received = torch.empty(source + 1, 3, dtype=torch.float64)
    comm.exchange_single_tensor(source, reader, received, torch.full((rank + 1, 3), float(rank)).double())
    return received


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_exchange_single_tensor(pool, world_size, step):
    for rank, received in enumerate(pool.run(pass_around, step)):
        source = (rank - step) % world_size
        assert torch.equal(received, torch.full((source + 1, 3), float(source)).double())


def unlike_calls():
    comm.all_reduce(torch.ones(2)) if sar.rank() == 0 else comm.exchange_tensors([torch.ones(2), torch.ones(2)])


def unexpected_sizes():
    comm.exchange_tensors([torch.ones(3), torch.ones(3)], [3, 4])


def too_few_tensors():
    comm.exchange_tensors([torch.ones(3)])


def two_dtypes():
    comm.exchange_tensors([torch.ones(2), torch.ones(3, dtype=torch.float64 if sar.rank() else None)])


def two_widths():
    comm.exchange_tensors([torch.ones(2, 2), torch.ones(3, 2 + sar.rank())])


def unfit_room():
    comm.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(2), torch.ones(3)])


def receive_another_dtype():
    other = 1 - sar.rank()
    comm.exchange_single_tensor(other, other, torch.empty(2), torch.ones(1, dtype=torch.float64))


def nobody_sends():
    """Both want to receive from worker 0, which sends to itself, and hears of the other's error in its next call."""
    comm.exchange_single_tensor(0, sar.rank(), torch.empty(2), torch.ones(2))
    sar.all_sum(1)


def go_wrong(how):
    """Every rank fails; then an agreed call works."""
    sar.Config.timeout = 10
    failure = catch_and_recover(how)
    total = torch.ones(1)
    comm.all_reduce(total)
    return failure, total.item()


@pytest.mark.parametrize(
    "how, culprits, words",  # without culprits, the workers disagree
    [
        (unlike_calls, [], "worker 1: exchange_tensors"),
        (unexpected_sizes, [0, 1], "expected lengths [3, 4]"),
        (too_few_tensors, [0, 1], "got 1 tensors"),
        (two_dtypes, [1], "float64[3] among tensors with rows like float32[0]"),
        (two_widths, [1], "float32[3, 3] among tensors with rows like float32[0, 2]"),
        (unfit_room, [0, 1], "expected lengths [2, 2]"),
        (receive_another_dtype, [0, 1], "float32"),
        (nobody_sends, [1], "expected lengths [2, 0], but [0, 2] arrive"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_what_a_worker_does_wrong_is_no_death_and_reaches_all(pool, how, culprits, words):
    for rank, (failure, total) in enumerate(pool.run(go_wrong, how)):
        assert isinstance(failure, Failure), "went through"
        own = "ConfigError" if rank in culprits else "PeerError"
        assert failure.kind in ((own, "PeerError") if culprits else ("DisagreementError",)), failure
        assert words in failure.message
        assert "died" not in failure.message
        assert total == 2
