"""`DistributedDataParallel` around a model: gradients of single-machine DGL with `ddp_sum_hook`, refused without."""

import dgl.function as fn
import dgl.nn
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sar
from tests.core.attempts import fail_on_all_ranks
from tests.parity.harness import check, random_data, weighted_sum
from tests.parity.scenarios import SCENARIOS

pytestmark = pytest.mark.processes("virtual workers refuse DistributedDataParallel")


class Model(nn.Module):
    """Built-in and Python messages, statistics of all nodes, and parameters that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first = dgl.nn.GATConv(6, 3, 2, residual=True, allow_zero_in_degree=True)
        self.norm = sar.DistributedBN1D(6) if dist.is_initialized() else nn.BatchNorm1d(6)
        self.message = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)

    def forward(self, graph, x, w):
        with graph.local_scope():
            graph.ndata["h"] = self.norm(self.first(graph, x).flatten(1))
            graph.edata["w"] = w
            graph.update_all(lambda edges: {"m": self.message(edges.src["h"]) * edges.data["w"]}, fn.mean("m", "out"))
            return graph.ndata["out"].tanh()


def trained_with_ddp(graph, data, mode_of_unused, bucket_mb, summed_again=False, hook=True):
    """Three steps of gradient descent from the parameters of worker 0."""
    torch.manual_seed(sar.rank() if dist.is_initialized() else 0)
    model = Model().to(data.nodes["x"].dtype)
    if mode_of_unused == "absent":
        del model.unused
    trained = model
    if dist.is_initialized():
        sar.patch_dgl()
        trained = DistributedDataParallel(
            model, find_unused_parameters=mode_of_unused == "found", bucket_cap_mb=bucket_mb
        )
        if hook:
            trained.register_comm_hook(None, sar.ddp_sum_hook)
        sar.sync_params(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        x, w = data.leaf("x"), data.leaf("w")
        optimizer.zero_grad()
        out = trained(graph, x, w)
        weighted_sum(out, data.nodes["cotangent"]).backward()
        if summed_again:
            sar.gather_grads(trained)
        optimizer.step()
    results = {"node output": out, "node x.grad": x.grad, "edge w.grad": w.grad}
    results |= {f"same {name}": value for name, value in model.state_dict().items() if "num_batches" not in name}
    return results | {f"same {name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode_of_unused, bucket_mb", [("absent", 25), ("absent", 1e-4), ("found", 25)])
@pytest.mark.parametrize("scenario", ["isolated", "first worker without nodes"])
@pytest.mark.parametrize("world_size", [2])
def test_gradients_are_those_of_the_whole_graph(pool, world_size, scenario, mode_of_unused, bucket_mb):
    parts = SCENARIOS[scenario](world_size)
    assert len(set(parts.node_counts)) > 1, "an average over workers would be something else"
    check(pool, parts, random_data(parts, torch.float64), [(trained_with_ddp, (mode_of_unused, bucket_mb))])


@pytest.mark.parametrize(
    "options, words",
    [({"hook": False}, ("averages", "register_comm_hook")), ({"summed_again": True}, ("gather_grads", "Leave"))],
    ids=["average", "summed twice"],
)
@pytest.mark.parametrize("world_size", [2])
def test_wrong_sums_are_refused(pool, options, words):
    arguments = {"mode_of_unused": "absent", "bucket_mb": 25, "summed_again": False, "hook": True} | options
    for failure in fail_on_all_ranks(pool, SCENARIOS["random"](2), trained_with_ddp, *arguments.values()):
        assert failure.kind == "ConfigError", failure
        for word in words:
            assert word in failure.message, failure.message


def evaluated(graph, data):
    """Without gradients there is nothing to average."""
    torch.manual_seed(0)
    model = dgl.nn.SAGEConv(6, 4, "mean").to(data.nodes["x"].dtype)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    with torch.no_grad():
        return {"node output": wrapped(graph, data.nodes["x"])}


@pytest.mark.parametrize("world_size", [2])
def test_evaluation_needs_no_hook(pool, world_size):
    parts = SCENARIOS["random"](world_size)
    check(pool, parts, random_data(parts, torch.float64), [(evaluated, ())])
