"""`sar infer`: outputs of some nodes, against DGL and PyTorch Geometric on the whole graph in one process."""

import resource
from collections.abc import Iterator
from pathlib import Path

import sar  # isort: skip  (before dgl)
import dgl
import dgl.function as fn
import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
import torch_geometric.nn as gnn
from dgl.nn import EdgeWeightNorm, GATConv, GraphConv, HeteroGraphConv, PNAConv, SAGEConv, SGConv
from torch import nn

from sar.cli import main
from sar.data.partition_json import read_partition_json
from sar.errors import ConfigError, GraphError, PartitionError
from sar.train import inference
from sar.train.inference import infer

NODES = np.array([41, 3, 250, 3, 77])


class Stack(nn.Module):
    """Two layers of DGL's."""

    def __init__(self, *layers: nn.Module, weight: str | None = None) -> None:
        super().__init__()
        self.layers, self.weight = nn.ModuleList(layers), weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, graph, x):
        first, last = self.layers
        options = {} if self.weight is None else {"edge_weight": graph.edata[self.weight]}
        return last(graph, self.norm(first(graph, x, **options).flatten(1)).relu(), **options).flatten(1)


def sparse_graph() -> dgl.DGLGraph:
    """A graph in which two hops are few nodes, some nodes without neighbours but themselves."""
    random = torch.Generator().manual_seed(0)
    graph = dgl.graph((torch.randint(300, (350,), generator=random), torch.randint(280, (350,), generator=random)))
    graph = dgl.add_self_loop(dgl.add_nodes(graph, 300 - graph.num_nodes()))
    graph.ndata["feat"] = torch.rand(300, 5, generator=random, dtype=torch.float64)
    graph.ndata["label"] = torch.randint(3, (300,), generator=random)
    graph.edata["w"] = torch.rand(graph.num_edges(), generator=random, dtype=torch.float64)
    return graph


@pytest.fixture(scope="module")
def whole() -> dgl.DGLGraph:
    return sparse_graph()


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "p"
    sar.partition_graph(whole, "graph", 3, path, part_method="random")
    return path


@pytest.fixture(autouse=True)
def dgl_as_it_was() -> Iterator[None]:
    """Making a graph patches DGL's layers."""
    sar.unpatch_dgl()
    yield
    sar.unpatch_dgl()


def saved(model: nn.Module, path: Path) -> Path:
    """Its state, with parameters that are not those that it is made with, in a file."""
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.rand(value.shape, generator=generator, dtype=torch.float64) if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    torch.save(state, path)
    model.double().eval().load_state_dict(state)
    return path


MODELS = {
    "sage": lambda: Stack(SAGEConv(5, 8, "mean"), SAGEConv(8, 3, "pool")),
    "gcn": lambda: Stack(GraphConv(5, 8), GraphConv(8, 3)),  # reads out-degrees of sources
    "weighted": lambda: Stack(GraphConv(5, 8, "right"), SAGEConv(8, 3, "mean"), weight="w"),
    "gat": lambda: Stack(GATConv(5, 4, 2), GATConv(8, 3, 1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_as_on_the_whole_graph(name, whole, folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(inference, "_read", lambda *call, read=inference._read: asked.append(call[2]) or read(*call))
    model = MODELS[name]()
    weights = saved(model, tmp_path / "model.pt")
    with torch.no_grad():
        expected = model(whole, whole.ndata["feat"])[NODES].numpy()
    for hops in (None, 2):
        found = infer(folder, lambda info: MODELS[name](), weights, NODES, hops=hops)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert asked == [0, 2, 0, 2]  # of stand-ins, and as many hops as there are layers
    with pytest.raises(GraphError, match=r"layers\.1, or code before it, uses more of the graph than 1 hops"):
        infer(folder, lambda info: MODELS[name](), weights, NODES, hops=1)
    assert infer(folder, lambda info: MODELS[name](), weights, NODES[:0]).shape == (0, 3)


def test_no_more_is_read_than_outputs_depend_on(whole, folder):
    spec = read_partition_json(folder)
    _, nodes = inference._find_nodes(spec, None, NODES)
    found = inference._read(spec, nodes.unique(), 2)
    expected, _ = dgl.khop_in_subgraph(whole, np.unique(NODES), k=2)
    assert len(found.nodes) == expected.num_nodes() < 100
    assert found.node_features["_N/feat"].shape == (expected.num_nodes(), 5)


@pytest.mark.parametrize("layer", ["GCNConv", "GATConv", "SAGEConv"])
def test_layers_of_pyg(layer, whole, folder, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = getattr(gnn, layer)(5, 8), getattr(gnn, layer)(8, 3)  # GCN: degrees of sources

        def forward(self, graph, x):
            edges = graph if isinstance(graph, torch.Tensor) else sar.pyg.edge_index(graph)
            return self.last(self.first(x, edges).relu(), edges)

    model = Model()
    weights = saved(model, tmp_path / "model.pt")
    with torch.no_grad():
        expected = model(torch.stack(whole.edges()), whole.ndata["feat"])[NODES].numpy()
    for hops in (None, 2):
        found = infer(folder, lambda info: Model(), weights, NODES, hops=hops)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


class Lone(nn.Module):
    """A module, and a function of it, the graph and the features."""

    def __init__(self, module, function):
        super().__init__()
        self.layer, self.function = module, function

    def forward(self, graph, x):
        return self.function(self.layer, graph, x)


def lone(make, function=lambda layer, graph, x: layer(graph, x)):
    return lambda: Lone(make(), function)


def sage():
    return SAGEConv(5, 3, "mean")


def after(change):
    """A layer whose output is changed, by a function of it, the graph and the features."""
    return lone(sage, lambda layer, graph, x: change(layer(graph, x), graph, x))


def on_edges(layer, graph, x):
    return layer(x, torch.stack(graph.edges()) if isinstance(graph, dgl.DGLGraph) else sar.pyg.edge_index(graph))


def size(graph):
    """Nodes and edges of the whole graph."""
    if isinstance(graph, dgl.DGLGraph):
        return graph.num_nodes() / graph.num_edges()
    return graph.num_nodes_global() / graph.num_edges_global()


def by_source(layer, graph, x):
    with graph.local_scope():
        graph.edata["a"] = dgl.nn.functional.edge_softmax(graph, graph.edata["w"].unsqueeze(1), norm_by="src")
        graph.srcdata["h"] = layer(x)
        graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "h"))
        return graph.dstdata["h"]


def normed(layers, graph, x):
    return layers[1](graph, x, edge_weight=layers[0](graph, graph.edata["w"]))


EXACT = {
    "counts": after(lambda out, graph, x: out * size(graph)),
    "out-degrees": lone(sage, lambda layer, graph, x: layer(graph, x * graph.out_degrees().unsqueeze(1))),
    "self-loops": lone(sage, lambda layer, graph, x: layer(graph.remove_self_loop().add_self_loop(), x)),
    "PNAConv": lone(lambda: PNAConv(5, 3, ["mean", "max"], ["identity", "amplification"], 2.5)),  # by all nodes' number
    "SGConv, cached": lone(lambda: SGConv(5, 3, 2, cached=True)),
    "GCNConv, cached": lone(lambda: gnn.GCNConv(5, 3, cached=True), on_edges),
    "without parameters": lone(lambda: gnn.APPNP(2, 0.1), on_edges),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_needs_the_whole_graph_and_is_known_of_it(name, whole, folder, tmp_path):
    model = EXACT[name]()
    weights = saved(model, tmp_path / "model.pt")
    with torch.no_grad():
        expected = model(whole, whole.ndata["feat"])[NODES].numpy()
    np.testing.assert_allclose(infer(folder, lambda info: EXACT[name](), weights, NODES, check=9), expected, rtol=1e-10)


REFUSED = {  # by what the error says
    "EdgeWeightNorm layer.0,": lone(lambda: nn.ModuleList([EdgeWeightNorm("both"), GraphConv(5, 3, "none")]), normed),
    "Lone,": lone(lambda: nn.Linear(5, 3), by_source),
    "ChebConv layer,": lone(lambda: gnn.ChebConv(5, 3, 3), on_edges),
    "SAGEConv layer.conv_out,": lone(lambda: gnn.DirGNNConv(gnn.SAGEConv(5, 3)), on_edges),
    "HypergraphConv was called with": lone(lambda: gnn.HypergraphConv(5, 3), on_edges),
    "GraphNorm layer,": lone(lambda: gnn.GraphNorm(5), lambda layer, graph, x: layer(x)),
    "Dropout layer,": lone(lambda: nn.Dropout(), lambda layer, graph, x: layer.train()(x)),
    r"raised an error on 7 nodes .*\(RuntimeError: ": lone(
        lambda: nn.Embedding(300, 5), lambda layer, graph, x: layer.weight + x
    ),
    r"returns .*3\]\); expected 7 rows": after(lambda out, graph, x: out[:1]),
    "returns <class 'tuple'>": after(lambda out, graph, x: (out, x)),
}
CHANGED = {
    "mean": lambda out, graph, x: out - out.mean(0),
    "greatest": lambda out, graph, x: out / out.sigmoid().max(),
    "least weight": lambda out, graph, x: out / graph.edata["w"].min(),
    "in-degrees": lambda out, graph, x: out / graph.in_degrees().max(),
    "out-degrees": lambda out, graph, x: out / graph.out_degrees().max(),
    "nodes here": lambda out, graph, x: out / graph.num_nodes(),
    "rows": lambda out, graph, x: out + torch.arange(len(x)).unsqueeze(1),
    "parity of rows": lambda out, graph, x: out + torch.arange(len(x)).unsqueeze(1) % 2,
    "rows from the last": lambda out, graph, x: out + torch.arange(len(x)).flip(0).unsqueeze(1),
    "IDs": lambda out, graph, x: out + graph.node_ids().unsqueeze(1),
    "random": lambda out, graph, x: out + torch.rand_like(out),
    "width": lambda out, graph, x: out @ out.T,
}
ALL_REFUSED = [*REFUSED.items(), *(("Lone, or code before it,", after(change)) for change in CHANGED.values())]


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("said, make", ALL_REFUSED, ids=[*REFUSED, *CHANGED])
def test_more_than_the_neighborhood_is_refused(said, make, folder, tmp_path):
    weights = saved(make(), tmp_path / "model.pt")
    torch.manual_seed(0)  # else dropout draws the same for a node in two runs once in 32 times
    with pytest.raises(GraphError, match=said):
        infer(folder, lambda info: make(), weights, NODES)


def test_check_compares_with_the_whole_graph(folder, tmp_path):
    """A model that tells small graphs from large ones looks alike under all surroundings."""
    make = after(lambda out, graph, x: out * (1 + (graph.num_nodes() > 250)))
    weights = saved(make(), tmp_path / "model.pt")
    infer(folder, lambda info: make(), weights, NODES)
    with pytest.raises(GraphError, match=r"Lone, or .* on the whole graph"):
        infer(folder, lambda info: make(), weights, NODES, check=2)


def test_tensors_keep_their_dtypes(whole, folder, tmp_path):
    make = lone(
        lambda: nn.ModuleList([sage(), nn.BatchNorm1d(3)]),
        lambda layers, graph, x: layers[1](layers[0](graph, x).to(layers[1].bias.dtype)),
    )
    model = make()
    saved(model, tmp_path / "model.pt")
    model.layer[1].bias.data += 1000.3  # 1000 in bfloat16
    with torch.no_grad():
        expected = model(whole, whole.ndata["feat"])[NODES].numpy()
    model.layer[0].bfloat16(), model.layer[1].float()
    for tolerance in 0.05, 4:
        torch.save(model.state_dict(), tmp_path / "model.pt")
        found = infer(folder, lambda info: make(), tmp_path / "model.pt", NODES)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=tolerance)
        model.bfloat16()


def typed_graph(seed: int) -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(seed)

    def ends(sources, destinations, count):
        return torch.randint(sources, (count,), generator=random), torch.randint(
            destinations, (count,), generator=random
        )

    edges = {
        ("author", "writes", "paper"): ends(90, 120, 160),
        ("paper", "cites", "paper"): ends(120, 120, 150),
        ("paper", "by", "author"): ends(120, 90, 160),
    }
    graph = dgl.heterograph(edges, {"author": 90, "paper": 120})
    for ntype, width in (("author", 4), ("paper", 6)):
        rows = graph.num_nodes(ntype)
        graph.nodes[ntype].data["feat"] = torch.rand((rows, width), generator=random, dtype=torch.float64)
    return graph


class Typed(nn.Module):
    def __init__(self, etypes, widths):
        super().__init__()
        kinds = {"norm": "both", "allow_zero_in_degree": True}
        self.first = HeteroGraphConv({r: SAGEConv((widths[u], widths[v]), 8, "mean") for u, r, v in etypes})
        self.last = HeteroGraphConv({r: GraphConv(8, 3, **kinds) for _, r, _ in etypes})

    def forward(self, graph, x):
        return self.last(graph, {ntype: rows.relu() for ntype, rows in self.first(graph, x).items()})


def test_types_and_a_graph_that_is_new(tmp_path):
    """Trained on one graph, asked about another."""
    old, new = typed_graph(0), typed_graph(1)
    model = Typed(old.canonical_etypes, {"author": 4, "paper": 6})
    weights = saved(model, tmp_path / "model.pt")
    with torch.no_grad():
        expected = model(new, {ntype: new.nodes[ntype].data["feat"] for ntype in new.ntypes})["paper"]
    sar.partition_graph(new, "new", 3, tmp_path / "new", part_method="random")

    def make(info):
        assert info.num_nodes == {"author": 90, "paper": 120}
        return Typed(info.canonical_etypes, info.in_widths)

    nodes = np.array([119, 0, 55])
    for hops in (None, 2):
        found = infer(tmp_path / "new", make, weights, nodes, ntype="paper", hops=hops)
        np.testing.assert_allclose(found, expected[nodes].numpy(), rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="ntype is None"):
        infer(tmp_path / "new", make, weights, nodes)


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
    more = [f"--node-feature={feature}" for feature in features]
    assert (
        main(["partition", "edges.csv", "--ids", "map", *more, "--method", "random", "--parts", "2", "--out", "p"]) == 0
    )
    Path("mymodel.py").write_text(MODEL)
    conv = SAGEConv(2, 3, "mean")
    torch.save({f"conv.{name}": value for name, value in conv.state_dict().items()}, "model.pt")
    x = torch.tensor([[1.5, 2], [3, 5], [0, 1], [4, 4]])  # cy, ann, di, bo
    graph = dgl.graph(([1, 3, 0, 2], [3, 0, 1, 1]))
    with torch.no_grad():
        expected = conv(graph, x)[[1, 2]].numpy()
    np.save("nodes.npy", np.array(["ann", "di"]))
    command = ["infer", "p", "--model", "mymodel.py:make_model", "--weights", "model.pt", "--nodes", "nodes.npy"]
    assert main([*command, "--out", "out.npy"]) == 0
    assert "wrote out.npy, float32 (2, 3)" in capsys.readouterr().out
    np.testing.assert_allclose(np.load("out.npy"), expected, rtol=1e-5)
    options = ["--hops", "1", "--check", "2", "--ntype", "_N", "--classes", "3"]
    assert main([*command, *options, "--out", "again.npy"]) == 0
    np.testing.assert_array_equal(np.load("again.npy"), np.load("out.npy"))

    Path("one.csv").write_text("id\nann\ndi\n")
    Path("two.csv").write_text("id,other\nann,1\ndi,2\n")
    pq.write_table(pyarrow.table({"id": ["ann", "di"]}), "nodes.parquet")
    for nodes in ("one.csv#id", "two.csv#id", "nodes.parquet"):
        assert main([*command[:-1], nodes, "--out", "listed.npy"]) == 0
        np.testing.assert_array_equal(np.load("listed.npy"), np.load("out.npy"))

    def fails(match, out="other.npy"):
        assert main([*command, "--out", out]) == 1
        assert match in capsys.readouterr().err
        assert not Path("other.npy").exists()

    fails("there is no folder missing", "missing/other.npy")
    fails("cannot be written ([Errno 28]", "/dev/full")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (130, limits[1]))  # bytes of any file: of this one 128 + 24 are to come
    try:
        fails("other.npy cannot be written (")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    np.save("nodes.npy", np.array(["ann", "eve"]))
    fails("1 of the nodes, such as eve, are not in p")
    np.save("nodes.npy", np.array([1, 2]))
    fails("the nodes are int64 (2,); expected (S,) IDs like those there, |S3")
    np.save("nodes.npy", np.array(["ann"], object))
    fails("--nodes nodes.npy cannot be read: it holds pickled objects")
    np.save("nodes.npy", np.array(["ann"]))
    torch.save({"other": torch.zeros(2)}, "model.pt")
    fails("'model.pt' cannot be loaded into the model")
    torch.save(conv, "model.pt")  # a pickled module is not run
    fails("'model.pt' cannot be loaded into the model")
    Path("model.pt").write_text("step-000002\n")  # `latest` of a checkpoint
    fails("not a checkpoint")
    torch.save({"extra": None, "model": {}}, "model.pt")  # and what it names
    fails("not a checkpoint")


def test_numbers_in_text_without_labels(tmp_path, capsys, monkeypatch):
    """IDs are 0 to N - 1 here, and text files say them as strings."""
    monkeypatch.chdir(tmp_path)
    graph = sparse_graph()
    del graph.ndata["label"]
    graph.ndata["feat"] = graph.ndata["feat"].float()
    sar.partition_graph(graph, "graph", 2, tmp_path / "p", part_method="random")
    conv = SAGEConv(5, 3, "mean")
    torch.save({f"conv.{name}": value for name, value in conv.state_dict().items()}, "model.pt")
    Path("mymodel.py").write_text(MODEL.replace("width, classes, ", "width, classes + 0 // classes, "))
    Path("nodes.csv").write_text("node\n41\n3\n250\n")
    command = ["infer", "p", "--model", "mymodel.py:make_model", "--weights", "model.pt", "--nodes", "nodes.csv"]
    assert main([*command, "--out", "out.npy"]) == 1
    assert "ZeroDivisionError" in (said := capsys.readouterr().err)
    assert "Say how many: --classes C" in said
    assert main([*command, "--out", "out.npy", "--classes", "3"]) == 0
    with torch.no_grad():
        expected = conv(graph, graph.ndata["feat"])[[41, 3, 250]]
    np.testing.assert_allclose(np.load("out.npy"), expected, rtol=1e-5)
    Path("nodes.csv").write_text("0\n41\n3\n250\n")  # the name that pandas gives a column
    for header, rows in (("--header", 3), ("--no-header", 4)):
        assert main([*command, "--out", "out.npy", "--classes", "3", header]) == 0
        np.testing.assert_allclose(np.load("out.npy")[rows - 3 :], expected, rtol=1e-5)
    Path("nodes.csv").write_text("node\n41\nx3\n")
    assert main([*command[:-1], "nodes.csv#node", "--out", "out.npy", "--classes", "3"]) == 1
    assert "the nodes are |S2 (2,); expected (S,) IDs like those there, int64" in capsys.readouterr().err


def test_a_damaged_part_is_refused(whole, tmp_path):
    sar.partition_graph(whole, "graph", 1, tmp_path / "p", part_method="random")
    file = tmp_path / "p" / "part0" / "node_feat.dgl"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    model = MODELS["sage"]()
    with pytest.raises(PartitionError, match="checksum"):
        infer(tmp_path / "p", lambda info: MODELS["sage"](), saved(model, tmp_path / "model.pt"), NODES)
