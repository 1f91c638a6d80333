"""An epoch on a device: where the host waits for it, and that over NCCL the numbers are those of the CPU."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sar
from sar.comm import process_transport, replicas, session
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from sar.comm.replicas import Replicas
from sar.nn.statistics import global_max, global_mean
from tests import pretend_gpu
from tests.comm.pretend_nccl import PretendNccl
from tests.gpu.places import PRETEND, Place
from tests.parity.harness import Mine, assert_close, build, random_shares
from tests.pretend_gpu import PretendGpu, host_waits

DEVICE, EPOCHS = f"{pretend_gpu.NAME}:0", 3
MEANT = {
    "the script: _local_scalar_dense": 1,  # loss.item()
    "comm/replicas.py take_checksum: to the CPU": 1,  # once a step, for all parameters
    "nn/embedding.py _summed: _unique2": 1,  # how many rows of an embedding were used, once a step
    "core/passing/captured.py <dictcomp>: _local_scalar_dense": 2,  # fingerprints of messages, of both runs
    "core/passing/captured.py equals: _local_scalar_dense": 1,  # whether a Python function made the same messages again
}
THROUGH_THE_CPU = {
    "comm/exchange.py _post: synchronize": 11,  # tiles, before they are sent
    "nn/statistics.py from_all: to the CPU": 7,  # statistics and readout, forward and backward
    "comm/collectives.py _combine: to the CPU": 1,  # the maxima of the readout
    "comm/collectives.py gather_grads: to the CPU": 1,  # all gradients in one piece
    "tensors/views.py to_device: to the CPU": 2,  # gradients of rows of `fetch_rows`, and of the embedding
    "comm/transport.py _swap: to the CPU": 2,  # these rows
    "comm/collectives.py exchange_tensors: to the CPU": 2,  # and those that stay, of which there are none
}
"""What gloo needs."""


class Model(nn.Module):
    """What communicates in an epoch: layers, batch normalisation, lookups, rows of others, a mailbox and a readout."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.embedding = sar.nn.DistEmbedding(graph, 6)
        self.sage = dgl.nn.SAGEConv(6, 8, "mean")
        self.norm = sar.DistributedBN1D(8)
        self.gat = dgl.nn.GATConv(8, 4, 2, attn_drop=0.2, allow_zero_in_degree=True)
        self.head = nn.Linear(14, 3)

    def forward(self, graph: Any, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.sage(graph, x + self.embedding())).relu()
        h = self.gat(graph, h).flatten(1)
        graph.ndata["h"], graph.ndata["x"] = h, x
        graph.update_all(lambda edges: {"m": edges.src["h"].tanh()}, fn.max("m", "h"))
        graph.update_all(fn.copy_u("h", "m"), lambda nodes: {"h": nodes.mailbox["m"].sum(1)})
        graph.update_all(fn.copy_u("x", "m"), fn.sum("m", "x"))
        out = self.head(torch.cat([graph.ndata["h"], graph.ndata["x"]], 1))
        rows = sar.fetch_rows(graph, out, wanted).tanh() * self.embedding(wanted)[:, :3]
        return out.sum() + rows.sum() + (global_mean(h) * global_max(h)).sum()


_groups = itertools.count()


class Transport(ProcessTransport):
    """Which connects in a thread of its own."""

    def _connect(self) -> None:
        with PretendGpu():
            super()._connect()


@contextlib.contextmanager
def over(backend: str, device: str) -> Iterator[None]:
    """A group of its own for this worker, and all others."""
    replicas.type = lambda data: torch.Tensor  # parameters of the device's own class count, too
    process_transport.new_nccl = PretendNccl
    store, place = dist.distributed_c10d._get_default_store(), (dist.get_rank(), dist.get_world_size())
    where = torch.device(device if backend == "nccl" else "cpu")
    group = Group(Transport(dist.PrefixStore(f"group {next(_groups)}", store), *place, where))
    group.replicas = Replicas()
    with session.standing_in(group):
        yield
    group.replicas.close()
    group.close()


def train(
    mine: Mine, backend: str, wire: torch.dtype | None = None, mode: int = 1
) -> tuple[list[list[float]], Counter[str]]:
    """The losses of each epoch on the CPU and on the device, and where the host waits in the last epoch there."""
    pretend_gpu.install()
    sar.patch_dgl()
    losses, waits = [], Counter()
    for device in ("cpu", DEVICE):
        with PretendGpu(), over("gloo" if device == "cpu" else backend, device):
            torch.manual_seed(1)
            partition, data = mine
            data.partition = partition
            here = data.to(device)
            graph = build(partition if backend == "gloo" else here.partition, mode).to(device)
            model = Model(graph).to(device)
            sar.Config.wire_dtype_features = sar.Config.wire_dtype_gradients = wire
            sar.sync_params(model)
            optimizers = [torch.optim.Adam(model.parameters(), 0.01), sar.nn.SparseAdam([model.embedding], 0.01)]
            wanted = torch.arange(0, graph.num_nodes_global(), 3).repeat(2)
            losses.append([])
            for _ in range(EPOCHS):
                with host_waits() as waits:
                    loss = model(graph, here.nodes["x"], wanted)
                    loss.backward()
                    sar.gather_grads(model)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    losses[-1].append(loss.item())
    return losses, waits


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("place", [PRETEND], indirect=True, ids=str)
def test_where_the_host_waits(place: Place, backend):
    for (expected, found), waits in place.pool.run(train, backend, per_rank=random_shares(place.world_size)):
        assert_close(torch.tensor(found), torch.tensor(expected))
        assert waits == (MEANT if backend == "nccl" else MEANT | THROUGH_THE_CPU)


def drift(rank):
    """A step after which the models differ in one element, and a call."""
    pretend_gpu.install()
    with PretendGpu(), over("nccl", DEVICE):
        model = nn.Linear(300, 2000).to(DEVICE)
        sar.sync_params(model)
        sar.gather_grads(model)
        with torch.no_grad():
            model.weight[-1, -1] += rank
        torch.optim.SGD(model.parameters(), 0.1).step()
        sar.all_sum(1)


def step_on_two_kinds(rank):
    """A model that is on the CPU of one worker and on the device of the other."""
    with pretend_gpu.in_place_of(DEVICE), over("gloo", DEVICE):
        model = nn.Linear(3, 2).to(DEVICE if rank else "cpu")
        sar.sync_params(model)
        sar.gather_grads(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
        sar.all_sum(1)


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("place", [PRETEND], indirect=True, ids=str)
def test_rows_that_travel_in_half_precision(place: Place):
    for backend, mode in (("gloo", 1), ("nccl", 2)):
        mine = random_shares(place.world_size)
        for (expected, found), _ in place.pool.run(train, backend, torch.bfloat16, mode, per_rank=mine):
            assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize("place", [PRETEND], indirect=True, ids=str)
def test_models_on_the_device_are_compared(place: Place):
    for outcome in place.pool.outcomes(drift, per_rank=range(place.world_size)):
        assert (outcome.kind, "models are not the same" in outcome.message) == ("DisagreementError", True)
    for outcome in place.pool.outcomes(step_on_two_kinds, per_rank=range(place.world_size)):
        assert outcome.kind == "DisagreementError"
        assert "on the CPU of some and on a device of others" in outcome.message
