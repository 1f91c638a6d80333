"""`sar infer`: outputs of all nodes and of some, against DGL and PyTorch Geometric in one process."""

import resource
from collections.abc import Iterator
from pathlib import Path

import sar  # isort: skip  (before dgl)
import dgl
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
import torch_geometric.nn as gnn
from dgl.nn import GATConv, GraphConv, HeteroGraphConv, SAGEConv
from torch import nn
from torch_geometric.data import Data

from sar.cli import main
from sar.comm import session
from sar.comm.group import Group
from sar.comm.transport import Transport
from sar.errors import ConfigError, GraphError, PartitionError
from sar.train.inference import infer

NODES = np.array([41, 3, 250, 3, 77])


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """A job of this process alone, and DGL's layers as they were before a graph was made."""
    with session.standing_in(Group(Transport(0, 1))):
        sar.unpatch_dgl()
        yield
        sar.unpatch_dgl()


class OfDgl(nn.Module):
    def __init__(self, *layers: nn.Module, weight: str | None = None) -> None:
        super().__init__()
        self.layers, self.weight, self.norm = nn.ModuleList(layers), weight, nn.BatchNorm1d(8)

    def forward(self, graph, x):
        options = {} if self.weight is None else {"edge_weight": graph.edata[self.weight]}
        x = self.norm(self.layers[0](graph, x, **options).flatten(1)).relu()
        return self.layers[1](graph, x, **options).flatten(1)


class OfPyg(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index, w=None):
        for layer in self.layers:
            x = layer(x, *[edge_index] * isinstance(layer, gnn.MessagePassing))
        return x if w is None else self.layers[-1](x, edge_index, w)


class OfData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = gnn.GraphConv(5, 3)

    def forward(self, data):
        return self.layer(data.x, data.edge_index, data.w) * data.y[:, None]


MODELS = {
    "GraphConv": lambda: OfDgl(GraphConv(5, 8), GraphConv(8, 3)),  # reads out-degrees of sources
    "edge weights": lambda: OfDgl(GraphConv(5, 8, "right"), SAGEConv(8, 3, "mean"), weight="w"),
    "GATConv": lambda: OfDgl(GATConv(5, 4, 2), GATConv(8, 3, 1)),
    "PyG: edge weights": lambda: OfPyg(gnn.GATConv(5, 8), nn.BatchNorm1d(8), gnn.GCNConv(-1, 8)),
    "PyG: a model of its own": lambda: gnn.GCN(5, 8, 2, 3, norm="batch_norm", cached=True),
    "PyG: Sequential": lambda: gnn.Sequential("x, edge_index", [(gnn.SAGEConv(-1, 3), "x, edge_index -> x")]),
    "PyG: the data": OfData,
}


def one_machine(model: nn.Module, whole: dgl.DGLGraph) -> np.ndarray:
    x, edge_index, w = whole.ndata["feat"], torch.stack(whole.edges()), whole.edata["w"]
    with torch.no_grad():
        if isinstance(model, OfDgl):
            return model(whole, x).numpy()
        if isinstance(model, OfData):
            return model(Data(x, edge_index, w=w, y=whole.ndata["label"])).numpy()
        return model(x, edge_index, *[w] * isinstance(model, OfPyg)).numpy()


def make_whole(num_nodes: int = 300) -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)
    ends = (torch.randint(num_nodes, (700,), generator=random) for _ in range(2))
    graph = dgl.add_self_loop(dgl.graph(tuple(ends), num_nodes=num_nodes))
    graph.ndata["feat"] = torch.rand(num_nodes, 5, generator=random, dtype=torch.float64)
    graph.ndata["label"] = torch.randint(3, (num_nodes,), generator=random)
    graph.edata["w"] = torch.rand(graph.num_edges(), generator=random, dtype=torch.float64)
    return graph


@pytest.fixture(scope="module")
def whole() -> dgl.DGLGraph:
    return make_whole()


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "p"
    sar.partition_graph(whole, "graph", 3, path, part_method="random")
    return path


def saved(model: nn.Module, path: Path) -> Path:
    """The file of its state, with parameters that are not those that it is made with."""
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.rand(value.shape, generator=generator, dtype=torch.float64) if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    torch.save(state, path)
    model.double().eval().load_state_dict(state)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_outputs_equal_those_of_one_machine(name, whole, folder, tmp_path):
    model, make_model = MODELS[name](), lambda info: MODELS[name]()
    expected = one_machine(model.double(), whole)  # which gives lazy layers their widths
    weights, out = saved(model, tmp_path / "model.pt"), tmp_path / "out.npy"
    expected = one_machine(model, whole)
    for workers, spill in ((1, None), (2, None), (None, tmp_path)):
        infer(folder, make_model, weights, out=out, workers=workers, spill=spill)
        np.testing.assert_allclose(np.load(out), expected, rtol=1e-10, atol=1e-10)
    infer(folder, make_model, weights, NODES, out=out)
    np.testing.assert_allclose(np.load(out), expected[NODES], rtol=1e-10, atol=1e-10)
    assert {file.name for file in tmp_path.iterdir()} == {"model.pt", "out.npy"}


def of_a_job(folder, weights, out, workers):
    infer(folder, lambda info: MODELS["GraphConv"](), weights, out=out, workers=workers)


@pytest.mark.parametrize("world_size", [2])
def test_processes_of_a_job_share_the_partitions(pool, world_size, whole, folder, tmp_path):
    """Three partitions: on two processes with one share each, and with two workers each."""
    model = MODELS["GraphConv"]()
    weights, out = saved(model, tmp_path / "model.pt"), tmp_path / "out.parquet"
    with torch.no_grad():
        expected = model(whole, whole.ndata["feat"]).numpy()
    for workers in (1, None):
        pool.run(of_a_job, folder, weights, out, workers)
        table = pandas.read_parquet(out)
        assert table["id"].tolist() == list(range(300))
        np.testing.assert_allclose(table[["out_0", "out_1", "out_2"]], expected, rtol=1e-10, atol=1e-10)


class TypedOfDgl(nn.Module):
    def __init__(self, etypes, widths):
        super().__init__()
        kinds = {"norm": "both", "allow_zero_in_degree": True}
        self.first = HeteroGraphConv({r: SAGEConv((widths[u], widths[v]), 8, "mean") for u, r, v in etypes})
        self.last = HeteroGraphConv({r: GraphConv(8, 3, **kinds) for _, r, _ in etypes})

    def forward(self, graph, x):
        return self.last(graph, {ntype: rows.relu() for ntype, rows in self.first(graph, x).items()})


class TypedOfPyg(nn.Module):
    def __init__(self, etypes, widths):
        super().__init__()
        self.first = gnn.HeteroConv({etype: gnn.SAGEConv((-1, -1), 8) for etype in etypes})
        self.last = gnn.HeteroConv({etype: gnn.GraphConv(8, 3) for etype in etypes})

    def forward(self, x_dict, edge_index_dict, w_dict):
        x_dict = {ntype: rows.relu() for ntype, rows in self.first(x_dict, edge_index_dict).items()}
        return self.last(x_dict, edge_index_dict, edge_weight_dict=w_dict)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = gnn.SAGEConv((-1, -1), 8), gnn.GATConv((-1, -1), 3, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


TYPED = {
    "DGL": TypedOfDgl,
    "PyG": TypedOfPyg,
    "to_hetero": lambda etypes, widths: gnn.to_hetero(Layers(), (list(widths), etypes)),
}


@pytest.mark.parametrize("name", TYPED)
def test_node_types(name, tmp_path):
    random = torch.Generator().manual_seed(0)
    counts, widths = {"author": 90, "paper": 120}, {"author": 4, "paper": 6}
    etypes = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")]
    edges = {
        (u, r, v): tuple(torch.randint(counts[of], (160,), generator=random) for of in (u, v)) for u, r, v in etypes
    }
    whole = dgl.heterograph(edges, counts)
    for ntype, width in widths.items():
        whole.nodes[ntype].data["feat"] = torch.rand(counts[ntype], width, generator=random, dtype=torch.float64)
    for etype in etypes:
        whole.edges[etype].data["w"] = torch.rand(160, generator=random, dtype=torch.float64)
    x = {ntype: whole.nodes[ntype].data["feat"] for ntype in counts}
    ends = {etype: torch.stack(whole.edges(etype=etype)) for etype in etypes}
    given = {"DGL": (whole, x), "PyG": (x, ends, whole.edata["w"]), "to_hetero": (x, ends)}[name]
    model = TYPED[name](whole.canonical_etypes, widths).double()
    with torch.no_grad():
        model(*given)  # which gives lazy layers their widths
        weights, out = saved(model, tmp_path / "model.pt"), tmp_path / "out.npy"
        expected = model(*given)["paper"].numpy()
    sar.partition_graph(whole, "typed", 3, tmp_path / "p", part_method="random")

    def make_model(info):
        assert info.num_nodes == counts
        return TYPED[name](info.canonical_etypes, info.in_widths)

    infer(tmp_path / "p", make_model, weights, out=out, ntype="paper")
    np.testing.assert_allclose(np.load(out), expected, rtol=1e-10, atol=1e-10)
    infer(tmp_path / "p", make_model, weights, np.array([119, 0, 55]), out=out, ntype="paper")
    np.testing.assert_allclose(np.load(out), expected[[119, 0, 55]], rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="no node type is named; expected one of"):
        infer(tmp_path / "p", make_model, weights, out=out)


def test_dtypes_of_weights_stay_and_bfloat16_is_written_as_float32(whole, folder, tmp_path):
    """1000.3 is 1000 in bfloat16."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = SAGEConv(5, 3, "mean"), nn.BatchNorm1d(3)

        def forward(self, graph, x):
            return self.norm(self.conv(graph, x).to(self.norm.bias.dtype))

    model, weights, out = Mixed(), tmp_path / "model.pt", tmp_path / "out.npy"
    saved(model, weights)
    model.norm.bias.data += 1000.3
    with torch.no_grad():
        expected = model(whole, whole.ndata["feat"]).numpy()
    model.conv.bfloat16(), model.norm.float()
    for tolerance in 0.05, 4:
        torch.save(model.state_dict(), weights)
        infer(folder, lambda info: Mixed(), weights, out=out)
        assert np.load(out).dtype == np.float32
        np.testing.assert_allclose(np.load(out), expected, atol=tolerance)
        model.bfloat16()


class OfWeights(gnn.GCNConv):
    def forward(self, x, edge_index, weight):
        return super().forward(x, edge_index, weight)


class Ending(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, graph, x):
        return self.change(x)


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: OfPyg(gnn.GCNConv(5, 3), gnn.GraphNorm(3)), ConfigError),  # would take one worker's rows for all
        (lambda: OfWeights(5, 3), ConfigError),  # there is no such feature
        (lambda: Ending(lambda x: x[:1]), GraphError),
        (lambda: Ending(lambda x: (x, x)), GraphError),
        (lambda: Ending(lambda x: {"other": x}), GraphError),
    ],
)
def test_refused_models(make, error, folder, tmp_path):
    with pytest.raises(error):
        infer(folder, lambda info: make(), saved(make(), tmp_path / "model.pt"), out=tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


def test_a_damaged_part_is_refused(whole, tmp_path):
    sar.partition_graph(whole, "graph", 2, tmp_path / "p", part_method="random")
    file = tmp_path / "p" / "part1" / "node_feat.dgl"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    weights = saved(MODELS["GraphConv"](), tmp_path / "model.pt")
    with pytest.raises(PartitionError, match="checksum"):
        infer(tmp_path / "p", lambda info: MODELS["GraphConv"](), weights, out=tmp_path / "out.npy")


MODEL = """
import dgl.nn, torch

class Model(torch.nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.conv = dgl.nn.SAGEConv(width, classes, "mean")

    def forward(self, graph, x):
        return self.conv(graph, x)

def make_model(info):
    return Model(info.in_widths["_N"], info.num_classes)
"""


def test_the_command_with_names_for_nodes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("edges.csv").write_text("src,dst\nann,bo\nbo,cy\ncy,ann\ndi,ann\n")
    Path("nodes.csv").write_text("id,a,b,label\ncy,1.5,2,0\nann,3,5,2\ndi,0,1,1\nbo,4,4,0\n")
    features = "id=nodes.csv#id", "feat=nodes.csv#a,b", "label=nodes.csv#label"
    given = ["--ids", "map", *(f"--node-feature={feature}" for feature in features)]
    assert main(["partition", "edges.csv", *given, "--method", "random", "--parts", "2", "--out", "p"]) == 0
    Path("mymodel.py").write_text(MODEL)
    conv = SAGEConv(2, 3, "mean")
    torch.save({f"conv.{name}": value for name, value in conv.state_dict().items()}, "model.pt")
    x = torch.tensor([[1.5, 2], [3, 5], [0, 1], [4, 4]])  # cy, ann, di, bo
    with torch.no_grad():
        expected = conv(dgl.graph(([1, 3, 0, 2], [3, 0, 1, 1])), x).numpy()

    command = ["infer", "p", "--model", "mymodel.py:make_model", "--weights", "model.pt"]
    assert main([*command, "--out", "all.parquet", "--memory", "4GiB", "--spill", "."]) == 0
    assert "wrote all.parquet" in capsys.readouterr().out
    table = pandas.read_parquet("all.parquet").set_index("id")
    np.testing.assert_allclose(table.loc[["cy", "ann", "di", "bo"]], expected, rtol=1e-5)

    Path("one.csv").write_text("id\nann\ndi\n")
    Path("two.csv").write_text("id,other\nann,1\ndi,2\n")
    pq.write_table(pyarrow.table({"id": ["ann", "di"]}), "nodes.parquet")
    for nodes in ("one.csv#id", "two.csv#id", "nodes.parquet"):
        options = ["--nodes", nodes, "--header", "--ntype", "_N", "--classes", "3", "--workers", "1"]
        assert main([*command, *options, "--out", "out.npy"]) == 0
        np.testing.assert_allclose(np.load("out.npy"), expected[1:3], rtol=1e-5)
    assert main([*command, "--nodes", "nodes.parquet", "--out", "some.parquet"]) == 0
    assert pandas.read_parquet("some.parquet")["id"].tolist() == ["ann", "di"]

    def fails(match, *options, out="other.npy"):
        before = sorted(Path().iterdir())
        assert main([*command, "--workers", "1", *options, "--out", out]) == 1
        assert match in capsys.readouterr().err
        assert sorted(Path().iterdir()) == before

    fails("there is no folder missing", out="missing/other.npy")
    fails("expected the name of an .npy or a .parquet file", out="other.csv")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for out, room in (("other.npy", 130), ("other.parquet", 130), ("other.parquet", 200)):  # .npy takes 176 bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            fails("cannot be written (", out=out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Path("one.csv").write_text("id\nann\neve\n")
    fails("1 of the nodes, such as eve, are not there", "--nodes", "one.csv#id")
    np.save("nodes.npy", np.array([1, 2]))
    fails("the nodes are int64 (2,); expected IDs like those there, |S3", "--nodes", "nodes.npy")
    np.save("nodes.npy", np.array(["ann"], object))
    fails("nodes.npy holds object", "--nodes", "nodes.npy")
    for content in ({"other": torch.zeros(2)}, {"extra": None, "model": {}}, conv):  # a pickled module is not run
        torch.save(content, "model.pt")
        fails("'model.pt' cannot be loaded into the model")
    Path("model.pt").unlink()
    fails("there is no file 'model.pt'; expected a state dict")


def test_numbers_in_text_are_the_nodes_of_numbered_graphs(whole, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mymodel.py").write_text(MODEL)
    conv = SAGEConv(5, 3, "mean").double()
    torch.save({f"conv.{name}": value for name, value in conv.state_dict().items()}, "model.pt")
    with torch.no_grad():
        expected = conv(whole, whole.ndata["feat"])[[41, 3, 250]]
    command = ["infer", str(folder), "--model", "mymodel.py:make_model", "--weights", "model.pt", "--out", "out.npy"]
    Path("nodes.csv").write_text("node\n41\n3\n250\n")
    assert main([*command, "--workers", "1", "--nodes", "nodes.csv", "--header"]) == 0
    np.testing.assert_allclose(np.load("out.npy"), expected, rtol=1e-5)
    Path("nodes.csv").write_text("node\n41\nx3\n")
    assert main([*command, "--workers", "1", "--nodes", "nodes.csv#node"]) == 1
    assert "the nodes are |S2 (2,); expected IDs like those there, int64" in capsys.readouterr().err
