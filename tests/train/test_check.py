"""`sar.check_model`: scripts that are right and that are not, on one worker and on several, and the sample it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import sar
from sar.adapters.dgl.gat_layers import _say_once
from sar.common_tuples import ETYPE, NTYPE, ORIG_ID
from sar.data.regroup import regroup
from sar.errors import ConfigError
from sar.nn.plain_layers import SAGEConv
from sar.train.check import _read_sample
from tests.core.attempts import catch_and_recover

USERS = 150
OF_LIBRARIES = ("DGL", "PyG", "edge features", "two types", "mean of items", "mean before GAT")
RIGHT = ("plain", "dropout", "graph vector", "norm of all", "float32", "sorted and back", *OF_LIBRARIES[:4])
WRONG = {  # and words of the error
    "mean": ("input of center (Identity): code before it", "sar.nn.global_mean"),
    "deviation": ("input of center (Identity): code before it", "sar.nn.global_mean"),
    "mean in a module": ("output of center (Center): code in it", "sar.nn.global_mean"),
    "mean of items": ("input of layer (HeteroGraphConv): code before it", "sar.nn.global_mean"),
    "mean before GAT": ("input of layer (GATConv): code before it", "sar.nn.global_mean"),
    "norm": ("output of norm (BatchNorm1d): it normalises", "sar.convert_batchnorm"),
    "random mask": ("input of last (SAGEConv): it depends on random numbers",),
    "sorted": ("output of last (SAGEConv): code in it", "reorders"),
    "local count": ("differ in loss, gradient", "loss of the model (Model)", "sar.Task.loss"),
    "not a number": ("losses nan and nan", "loss of the model"),
    "detached on worker 1": ("differ in gradient", "gradient of first.", "detached"),
    "another model": ("gradient of first.", "does not call the model"),
}


def write_graph(folder: Path, parts: int) -> str:
    """Users who know each other and buy items."""
    import dgl

    torch.manual_seed(0)
    label, items = torch.randint(4, (USERS,)), 40
    know = torch.randint(USERS, (2, 600))
    ends = {
        ("user", "knows", "user"): tuple(torch.cat([know, torch.arange(USERS).repeat(2, 1)], 1)),
        ("user", "buys", "item"): (torch.randint(USERS, (200,)), torch.randint(items, (200,))),
        ("item", "bought_by", "user"): (torch.randint(items, (200,)), torch.randint(USERS, (200,))),
    }
    graph = dgl.heterograph(ends, {"user": USERS, "item": items})
    graph.ndata["feat"] = {"user": torch.randn(USERS, 6) + label[:, None], "item": torch.randn(items, 6) ** 2}
    graph.nodes["user"].data.update(label=label, train_mask=torch.rand(USERS) < 0.5)
    graph.edges["knows"].data["w"] = torch.rand(600 + USERS, 2)
    dgl.save_graphs(str(folder / "graph.dgl"), [graph])
    sar.partition_graph(graph, "graph", parts, folder / "graph", part_method="random")
    return str(folder / "graph")


class Center(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Model(nn.Module):
    """Layers of sar's own on users who know each other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last, self.drop = SAGEConv(6, 8), SAGEConv(8, 4), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8) if "norm" in how else nn.Identity()
        self.center = Center() if how == "mean in a module" else nn.Identity()

    def forward(self, graph, features):
        graph, x = graph["knows"], features["user"]
        if self.how in ("mean", "deviation"):
            x = (x - x.mean(0)) / (1 if self.how == "mean" else x.std(0))
        x = x.float() if self.how == "float32" else x
        h = self.norm(self.first(graph, self.center(x)).relu())
        if self.how == "dropout":
            h = functional.dropout(self.drop(h), 0.3, self.training)
        elif self.how == "random mask":
            h = h * (torch.rand_like(h) > 0.5)
        elif "sorted" in self.how:
            order = h[:, 0].argsort()
            h = h[order] if self.how == "sorted" else self.drop(h[order])[order.argsort()]
        elif self.how == "detached on worker 1" and sar.rank() == 1:
            h = h.detach()
        out = self.last(graph, h)
        return (out, {"of the graph": sar.nn.global_mean(h)}) if self.how == "graph vector" else out


class Library(nn.Module):
    """Layers of DGL and PyTorch Geometric, with dropout."""

    def __init__(self, how: str) -> None:
        super().__init__()
        import dgl.nn
        import torch_geometric.nn

        self.how = how
        if how in ("DGL", "mean before GAT"):
            self.layer = dgl.nn.GATConv(6, 4, 1, feat_drop=0.5, attn_drop=0.5)
        elif how == "PyG":
            self.layer = torch_geometric.nn.GATv2Conv(6, 4, dropout=0.5)
        elif how == "edge features":
            self.layer = torch_geometric.nn.GINEConv(nn.Linear(6, 4), edge_dim=2)
        else:
            convs = {etype: dgl.nn.SAGEConv(6, 4, "mean") for etype in ("knows", "buys", "bought_by")}
            self.layer = dgl.nn.HeteroGraphConv(convs)

    def forward(self, graph, features):
        users, x = graph["knows"], features["user"]
        if self.how in ("DGL", "mean before GAT"):
            return self.layer(users, x if self.how == "DGL" else x - x.mean(0)).flatten(1)
        if self.how in ("PyG", "edge features"):
            return self.layer(x, sar.pyg.edge_index(users), *([users.edata["w"]] if self.how != "PyG" else []))
        if self.how == "mean of items":
            features = features | {"item": features["item"] - features["item"].mean(0)}
        return self.layer(graph, features)["user"]


def check(folder: str, how: str):
    """What `check_model` returns or raises, and whether it leaves everything as it was."""
    _say_once.cache_clear()
    sar.seed(0)
    model: nn.Module = (Library if how in OF_LIBRARIES else Model)(how)
    model, other = sar.convert_batchnorm(model) if how == "norm of all" else model, Model("plain").double()

    sar.sync_params(other)

    def loss_of(model, data):
        graph, task = sar.construct_full_graph(data), sar.Task.of(data)
        logits = (other if how == "another model" else model)(
            graph, {ntype: data[f"{ntype}/feat"] for ntype in graph.ntypes}
        )
        if how == "local count":
            return functional.cross_entropy(logits[task.masks["train"]], task.labels[task.masks["train"]])
        if how == "graph vector":
            logits, vector = logits
            return task.loss(logits, "train") + vector["of the graph"].sum() / sar.world_size()
        return task.loss(logits, "train") * (float("nan") if how == "not a number" else 1.0)

    def state() -> dict[str, Any]:
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        return {**model.state_dict(), **gradients, "draws": torch.get_rng_state()}

    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: value.clone() for name, value in state().items()}
    try:
        found = sar.check_model(model, loss_of, folder)
    except ConfigError as error:
        found = f"ConfigError: {error}"
    unchanged = all(torch.equal(value, before[name]) for name, value in state().items())
    hooks = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    default = torch.get_default_dtype() == torch.float32
    unwarned = _say_once.cache_info().currsize == 0  # the check's own hooks keep no layer from its fast path
    return found, unchanged and model.training and default and not hooks and unwarned, sar.all_sum(1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_right_and_wrong_scripts(pool, world_size, tmp_path):
    folder = write_graph(tmp_path, world_size)
    for how in (*RIGHT, *WRONG):
        found, unchanged, workers = zip(*pool.run(check, folder, how), strict=True)
        assert all(unchanged), how
        assert workers == (world_size,) * world_size, how  # who go on together
        agree = f"{max(world_size, 2)} workers and one process agree on output, loss, gradient (190 nodes"
        right = agree, "torch.float32" if how == "float32" else "torch.float64"
        assert len(set(found)) == 1, how
        assert found[0].startswith("ConfigError") == (how in WRONG), how
        for words in WRONG.get(how, right):
            assert words in found[0], (how, found[0])


def fail_on_worker_1(folder: str):
    """What a worker raises if a loss on its share cannot be computed, after which all go on."""
    model = nn.Linear(6, 1)

    def loss_of(model, data):
        if sar.rank() == 1:
            raise ValueError("no such column")
        return model(data["user/feat"]).sum()

    return catch_and_recover(sar.check_model, model, loss_of, folder), sar.all_sum(1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_on_one_worker_reaches_everybody(pool, world_size, tmp_path):
    for rank, (failure, workers) in enumerate(pool.run(fail_on_worker_1, write_graph(tmp_path, 2), timeout=30)):
        assert workers == world_size
        assert failure.kind == ("PeerError" if rank + 1 < world_size else "ValueError")
        assert "no such column" in failure.message


@pytest.mark.parametrize("nodes", [10_000, 30])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_sample_is_every_kth_node_with_all_of_its_in_edges(parts, nodes, tmp_path):
    import dgl

    write_graph(tmp_path, parts)
    [graph], _ = dgl.load_graphs(str(tmp_path / "graph.dgl"))
    partitions, ranges = _read_sample(tmp_path / "graph", nodes, 2)
    data = regroup(partitions, [(0, ranges[-1][1])], 0)
    kinds, original = data.node_features[NTYPE], data.node_features[ORIG_ID]
    assert nodes - 6 <= len(kinds) < nodes + 6 * parts if nodes < 190 else len(kinds) == 190
    assert all((kinds[start:end].bincount(minlength=2) > 0).all() for start, end in ranges)
    sampled = {ntype: original[kinds == kind] for kind, ntype in enumerate(data.node_type_names)}
    for ntype, ids in sampled.items():
        assert torch.equal(data[f"{ntype}/feat"], graph.nodes[ntype].data["feat"][ids])
    [((src, dst), features)] = data.all_shard_edges
    for kind, etype in enumerate(data.edge_type_names):
        edges = features[ETYPE] == kind
        ids, from_type, to_type = features[ORIG_ID][edges], etype[0], etype[2]
        expected = graph.in_edges(sampled[to_type], form="eid", etype=etype)
        assert torch.equal(ids.sort().values, expected.sort().values)
        u, v = graph.find_edges(ids, etype=etype)
        assert torch.equal(original[dst[edges]], v)
        there = torch.isin(u, sampled[from_type])
        assert torch.equal(original[src[edges]][there], u[there])
        assert (kinds[src[edges]] == data.node_type_names.index(from_type)).all()
        if etype[1] == "knows":
            assert torch.equal(features["user:knows:user/w"], graph.edges[etype].data["w"][ids])
