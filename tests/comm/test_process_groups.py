"""Several graphs in one job, each of one process group of torch: two graphs of two workers are as two jobs of two."""

import os
import signal
from functools import partial

import dgl.nn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sar
from sar.errors import CommunicationError, ConfigError
from tests.comm.launch import free_port, launch
from tests.core.attempts import catch
from tests.graphs import partition_in_memory, random_graph
from tests.parity.scenarios import scattered

GRAPHS, WORKERS, EPOCHS = 2, 2, 2
PROGRAM = """
import json, os
from tests.comm import test_process_groups
report = getattr(test_process_groups, os.environ["PROGRAM"])()
os.write(1, f"REPORT {json.dumps(report)}\\n".encode())
raise SystemExit
"""


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList([dgl.nn.SAGEConv(6, 8, "mean"), dgl.nn.SAGEConv(8, 3, "mean")])
        self.to(dtype)

    def forward(self, graphs, x):
        for layer, graph in zip(self.layers, graphs, strict=True):
            x = layer(graph, x.tanh())
        return x


def divided(number):
    """A graph in two partitions, of another size and other edges than those of other numbers; features and labels."""
    nodes = 40 + 10 * number
    parts = partition_in_memory(random_graph(number, nodes, 6 * nodes), scattered(nodes, WORKERS), WORKERS)
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(nodes, 6, generator=generator, dtype=torch.float64)
    return parts, x, torch.randint(3, (nodes,), generator=generator)


def own_share(number):
    """This worker's graph, features and labels."""
    parts, x, labels = divided(number)
    x, labels = parts.split_nodes(x)[sar.rank()], parts.split_nodes(labels)[sar.rank()]
    return sar.construct_full_graph(parts.partitions[sar.rank()]), x, labels


def join_mesh():
    """Set up this process as a worker of its graph; return the graph's number and the mesh."""
    sar.Config.timeout = 20.0
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (GRAPHS, WORKERS), mesh_dim_names=("data", "graph"))
    sar.initialize_comms(group=mesh["graph"])
    assert (sar.rank(), sar.world_size()) == (rank % WORKERS, WORKERS)
    return rank // WORKERS, mesh


def step(loss, model, optimizer):
    optimizer.zero_grad()
    loss.backward()
    sar.gather_grads(model)
    optimizer.step()
    return sar.all_sum(loss).item()


def train():
    """Losses of full-graph and mini-batch steps; in the second epoch, FAULT happens to worker 1 of graph 0.

    An "error", which comes with a signal, is recovered from.
    """
    if "GRAPH" in os.environ:  # in a job of its own
        number, rank, port = (int(os.environ[name]) for name in ("GRAPH", "RANK", "MASTER_PORT"))
        sar.initialize_comms(rank, WORKERS, "127.0.0.1", master_port_number=port)
    else:
        number, _ = join_mesh()
    fault = os.environ.get("FAULT") if (number, sar.rank()) == (0, 1) else None
    sar.patch_dgl()
    sar.seed(number)
    graph, x, labels = own_share(number)
    x, model, total = x.float(), Model(), sar.all_sum(len(labels))
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = sar.DistNeighborSampler([3, 3], input_node_features={"x": x}, output_node_features={"label": labels})
    seeds = torch.ones(len(labels), dtype=torch.bool)
    loader = sar.DataLoader(graph, seeds, sampler, batch_size=10, shuffle=True, num_workers=2)
    losses, epoch = [], 0
    report = {"number": number, "losses": losses, "stopped": sar.should_stop(), "heard": ""}
    while epoch < EPOCHS:
        try:
            if epoch == 1 and fault == "death":
                os._exit(0)
            if epoch == 1 and fault == "error":
                os.kill(os.getpid(), signal.SIGUSR1)
                fault = None
                with graph.local_scope():
                    raise ValueError("once")
            loss = F.cross_entropy(model([graph] * 2, x), labels, reduction="sum") / total
            losses.append(step(loss, model, optimizer))
            for blocks in loader:
                out = model(blocks, blocks[0].srcdata["x"])
                loss = F.cross_entropy(out, blocks[-1].dstdata["label"], reduction="sum") / total
                losses.append(step(loss, model, optimizer))
            folder = f"{os.environ['FOLDER']}/{number}"
            sar.save_checkpoint(folder, model=model, optimizer=optimizer, step=epoch + 1)
            epoch += 1
        except (ValueError, CommunicationError) as error:
            report["heard"] = f"{type(error).__name__}: {error}"
            if getattr(error, "final", False):
                break
            epoch = sar.recover(epoch)
    return report | {"stopped": sar.should_stop()}


def environments(program, size, **variables):
    """Variables of a launcher for processes that find each other."""
    shared = {"PROGRAM": program, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | variables | {"RANK": str(rank)} for rank in range(size)]


@pytest.fixture(scope="module")
def own_losses(tmp_path_factory):
    """The losses of each graph in a job of its own."""
    folder = str(tmp_path_factory.mktemp("own"))
    jobs = [environments("train", WORKERS, GRAPH=str(number), FOLDER=folder) for number in range(GRAPHS)]
    first, second, *others = [report["losses"] for report in launch(PROGRAM, [*jobs[0], *jobs[1]], timeout=120)]
    assert (first, others[0]) == (second, others[1])
    assert not {*first} & {*others[0]}
    return first, others[0]


@pytest.mark.parametrize("fault", ["error", "death"])
def test_two_graphs_are_as_two_jobs(own_losses, tmp_path, fault):
    reports = launch(PROGRAM, environments("train", GRAPHS * WORKERS, FAULT=fault, FOLDER=str(tmp_path)), timeout=120)
    of_graph = [[report for report in reports if report["number"] == number] for number in range(GRAPHS)]
    assert [len(each) for each in of_graph] == [2 - (fault == "death"), 2]
    for report in of_graph[1]:  # goes on as if nothing had happened
        assert (report["losses"], report["stopped"], report["heard"]) == (own_losses[1], False, "")
    assert (tmp_path / "1" / "latest").read_text() == f"step-{EPOCHS:06}\n"
    if fault == "death":
        [report] = of_graph[0]
        assert report["heard"].startswith("PeerError")
        assert "worker 1" in report["heard"]
        assert report["losses"] == own_losses[0][: len(own_losses[0]) // EPOCHS]
        return
    for report in of_graph[0]:
        assert (report["losses"], report["stopped"]) == (own_losses[0], True)
        assert "ValueError: once" in report["heard"]


def train_on_both():
    """A model of both graphs: sar or DDP sums gradients over the workers of a graph, and torch over the graphs."""
    number, mesh = join_mesh()
    sar.patch_dgl()
    graph, x, labels = own_share(number)
    torch.manual_seed(0)
    model = Model(torch.float64)
    sar.sync_params(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model, process_group=mesh["graph"].get_group())
    ddp.register_comm_hook(None, sar.ddp_sum_hook)
    for trained in (model, ddp):
        optimizer.zero_grad()
        F.cross_entropy(trained([graph] * 2, x), labels, reduction="sum").backward()
        if trained is model:
            sar.gather_grads(model)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh["data"].get_group())
        optimizer.step()
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def test_a_model_of_both_graphs():
    reports = launch(PROGRAM, environments("train_on_both", GRAPHS * WORKERS), timeout=120)
    torch.manual_seed(0)
    model = Model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for parts, x, labels in map(divided, range(GRAPHS)):
            F.cross_entropy(model([parts.reference()] * 2, x), labels, reduction="sum").backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        for report in reports:
            torch.testing.assert_close(
                torch.tensor(report[name], dtype=torch.float64), value.flatten(), rtol=1e-9, atol=1e-9
            )


def ask_for_others():
    """Each process is in a group of its own, and in the group of all, which sar has already."""
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(2)]
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "graph"))
    sar.initialize_comms(group=dist.group.WORLD)
    asked = {
        "two": both,
        "other": groups[1 - rank],
        "none": 1,
        "of": DeviceMesh("cpu", [1 - rank]),
        "new": groups[rank],
    }
    failures = {name: catch(partial(sar.initialize_comms, group=group)) for name, group in asked.items()}
    dist.destroy_process_group(groups[rank])
    return failures


@pytest.mark.processes("of process groups")
@pytest.mark.parametrize("world_size", [2])
def test_errors(pool):
    for failures in pool.run(ask_for_others):
        assert {failure.kind for failure in failures.values()} == {"ConfigError"}
        for name in ("other", "none", "of"):
            assert "expected a process group of torch.distributed that this process is in" in failures[name].message
        assert "dimensions ('data', 'graph'); expected the one" in failures["two"].message
        assert "another process group than the call before" in failures["new"].message


def test_workers_that_share_a_process_take_no_group(monkeypatch, tmp_path):
    for name, value in {"SAR_RESIDENT": "1", "SAR_PARTS": "2", "SAR_SPILL_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"SAR_RESIDENT.*leave `group` out"):
        sar.initialize_comms(group=dist.group.WORLD or 1)
