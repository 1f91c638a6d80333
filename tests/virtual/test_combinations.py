"""What a virtual worker has holds its numbers whoever looks at it and writes to it, and with whatever of torch's."""

import ctypes
import io
import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from dgl import backend as dgl_backend
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import sar
from sar.comm import session
from tests.virtual.virtual_pool import VirtualPool

SIZE = 2**16
"""Elements of a tensor that leaves memory."""


def passes():
    """Everything leaves memory: other workers have their turns, and fill theirs."""
    sar.all_sum(torch.ones(1))
    filling = [torch.full((SIZE,), -1.0) for _ in range(8)]
    sar.all_sum(torch.ones(1))
    del filling


def numbers(dtype=torch.float32):
    made = torch.arange(SIZE) + sar.rank()
    return made.to(dtype)


# -- writes that torch's dispatcher does not see


def at(address):
    return (ctypes.c_float * SIZE).from_address(address)


addresses: dict[int, int] = {}
WAYS = {
    "its address": lambda tensor: at(tensor.data_ptr()),
    "an address from before": lambda tensor: at(addresses.setdefault(threading.get_ident(), tensor.data_ptr())),
    "the storage": lambda tensor: at(tensor.untyped_storage().data_ptr()),
    "DGL": lambda tensor: np.from_dlpack(
        torch.from_dlpack(dgl_backend.zerocopy_to_dgl_ndarray_for_write(tensor).to_dlpack(0))
    ),
    "numpy": lambda tensor: tensor.numpy(),
    "DLPack": lambda tensor: torch.from_dlpack(tensor.__dlpack__()),
    "numpy's DLPack": lambda tensor: (np.from_dlpack(tensor), torch.from_dlpack(tensor))[1],  # numpy's is read-only
    "data": lambda tensor: tensor.data,
}


def written_unseen(way):
    tensor = numbers()
    tensor[0] = 0
    other = tensor.clone()
    found = []
    for _ in range(3):
        passes()
        tensor.sum()
        WAYS[way](tensor)[0] += 7
        read_by_all = sar.comm.exchange_tensors([tensor] * sar.world_size())
        passes()
        found.append(tensor[0].item())
        assert all(one[0].item() == found[-1] for one in read_by_all)
        assert torch.equal(tensor[1:], other[1:])
        tensor[0] = 0
    addresses.pop(threading.get_ident(), None)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_unseen_writes(way):
    assert VirtualPool(1, 2).run(written_unseen, way) == [[7.0] * 3] * 2


# -- what looks at memory past torch's dispatcher, or from elsewhere


def saved(tensor):
    file = io.BytesIO()
    torch.save({"of a model": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["of a model"]


def read_by_a_thread_meanwhile(tensor):
    """All the time."""
    wanted, wrong, stop = tensor.sum().item(), [], threading.Event()

    def reads():
        while not stop.is_set():
            wrong.extend(found for found in (tensor.sum().item(),) if found != wanted)

    threads = [threading.Thread(target=reads) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            passes()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    return tensor


def viewed_by_numpy(tensor):
    view = tensor.numpy()
    passes()
    return torch.from_numpy(view.copy())


def in_a_forked_process(tensor):
    """Which changes its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def answers():
        torch.set_num_threads(1)  # those of the parent are not here
        right = torch.equal(tensor.cpu(), torch.arange(SIZE) + sar.rank())
        tensor.zero_()
        theirs.send(right)
        theirs.recv()
        theirs.send(not tensor.any().item())
        os._exit(0)

    process = context.Process(target=answers, daemon=True)
    process.start()
    assert ours.poll(60)
    assert ours.recv()
    passes()
    before = tensor.clone()
    tensor.fill_(1)
    passes()
    ours.send(None)
    assert ours.poll(60)
    assert ours.recv()
    process.join()
    return before


def with_data_replaced(tensor):
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    passes()
    parameter.data = tensor
    passes()
    return parameter.detach()


LOOKS = {
    "pickled": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    **{look.__name__: look for look in (saved, read_by_a_thread_meanwhile)},
    **{look.__name__: look for look in (viewed_by_numpy, in_a_forked_process, with_data_replaced)},
}


def looked_at(name):
    with session.current_group().guard():  # as what calls return is made
        tensor = numbers()
    passes()
    found = LOOKS[name](tensor)
    passes()
    return torch.equal(found, numbers()), torch.equal(tensor, numbers()) or name == in_a_forked_process.__name__


@pytest.mark.parametrize("name", LOOKS)
def test_looks_from_elsewhere(name):
    assert VirtualPool(1, 2).run(looked_at, name) == [(True, True)] * 2


everybodys: dict[int, torch.Tensor] = {}


def passed_on():
    """What another worker has made, by a global of the process."""
    everybodys[sar.rank()] = numbers()
    passes()
    found = [torch.equal(everybodys[rank], torch.arange(SIZE) + rank) for rank in range(sar.world_size())]
    passes()
    everybodys[(sar.rank() + 1) % sar.world_size()][0] = 7
    passes()
    return all(found), everybodys[sar.rank()][0].item()


def test_tensors_of_other_workers():
    assert VirtualPool(1, 3).run(passed_on) == [(True, 7.0)] * 3


# -- what autograd saves


def complex_parts(x):
    z = torch.view_as_complex(x.view(-1, 2))
    return (z.conj() * z.roll(1)).imag.abs() * z.conj().real


def sparse_products(x):
    rows = torch.arange(SIZE // 8)
    matrix = torch.sparse_csr_tensor(torch.arange(SIZE // 8 + 1), rows.flip(0), torch.ones(SIZE // 8).double())
    of_pairs = torch.sparse_coo_tensor(torch.stack([rows, rows.roll(3)]), x[: SIZE // 8], (SIZE // 8, SIZE // 8))
    return (matrix @ x.view(-1, 8)).square().sum() + torch.sparse.mm(of_pairs, x.view(-1, 8)).square().sum()


def views(x):
    wide = x.view(256, -1)
    return (wide.t()[3:].expand(2, -1, -1) * wide[:, 3:].t() * x[:0].sum()).exp() * wide.t()[3:].square()


def on_a_hook(x):
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return x.sin() * x.exp()


def with_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x.float().view(256, -1) @ x.float().view(256, -1).t()


COMPUTED = {
    **{made.__name__: made for made in (complex_parts, sparse_products, views, on_a_hook, with_autocast)},
    "mapped over": lambda x: torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(x.view(64, -1)),
    "checkpointed": lambda x: checkpoint(lambda y: torch.nn.functional.dropout(y.sin()).exp(), x, use_reentrant=False),
}


def gradient(name, turns):
    torch.manual_seed(0)
    x = torch.randn(SIZE, dtype=torch.float64, requires_grad=True)
    y = COMPUTED[name](x)
    if turns:
        passes()
    y = y.double()
    z = y.square() * torch.linspace(1, 2, y.numel(), dtype=torch.float64).view_as(y)
    if turns:
        passes()
    (grad,) = torch.autograd.grad(z.sum(), x)
    return grad


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", COMPUTED)
def test_what_autograd_saves(name):
    expected = gradient(name, False)
    assert expected.any()
    for found in VirtualPool(1, 2).run(gradient, name, True):
        torch.testing.assert_close(found, expected)


def steps_in_between(changes):
    weight, x = torch.nn.Parameter(torch.ones(SIZE)), torch.ones(SIZE, requires_grad=True)
    optimizer = torch.optim.Adam([weight], foreach=True)
    weight.grad = torch.ones(SIZE)
    loss = (weight * x).sum()
    passes()
    if changes == "optimizer":
        optimizer.step()
    elif changes == "foreach":
        torch._foreach_mul_([weight.detach()], 2)
    else:
        weight.detach()[0] = 2
    passes()
    loss.backward()


@pytest.mark.parametrize("changes", ["optimizer", "foreach", "a row"])
def test_changes_in_place_are_noticed(changes):
    for outcome in VirtualPool(1, 2).outcomes(steps_in_between, changes):
        assert "has been modified by an inplace operation" in outcome.message
