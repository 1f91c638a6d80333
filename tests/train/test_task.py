"""`sar.Task`: loss and metrics over workers, against loops in Python over all nodes."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch_geometric.data import Data, HeteroData

import sar
from sar.cli.demo import community_graph
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.in_memory import divide
from sar.partition.ingest.masks import with_split
from tests.core.attempts import catch_and_recover

PARTS = ("train", "val", "test")
NAN = math.nan


@dataclass
class Nodes:
    """Of all workers, one after the other; and how many each has."""

    labels: torch.Tensor
    logits: torch.Tensor
    masks: dict[str, torch.Tensor]
    counts: list[int]

    def of(self, rank: int) -> "Nodes":
        def own(values: torch.Tensor) -> torch.Tensor:
            return values.split(self.counts)[rank]

        return Nodes(own(self.labels), own(self.logits), {name: own(mask) for name, mask in self.masks.items()}, [])


def nodes_of(kind: str, world_size: int) -> Nodes:
    """Worker 1 of several has no node; one class or column is rare; of the test mask nothing is known."""
    rng = np.random.default_rng(world_size)
    counts = [40] if world_size == 1 else [25, 0, 15][:world_size]
    count = sum(counts)
    split = torch.from_numpy(rng.integers(0, 3, count))
    masks = {name: split == number for number, name in enumerate(PARTS)}
    logits = torch.from_numpy(rng.normal(size=(count, 2 if kind == "two" else 5)).round(1))
    if kind in ("several", "several, some unknown"):
        labels = torch.from_numpy(rng.random((count, 5)) < [0.5, 0.5, 0.3, 0.05, 0.0]).float()
        unknown = torch.from_numpy(rng.random((count, 5)) < 0.3)
        unknown[split == 0] |= torch.from_numpy(rng.random(count) < 0.2)[split == 0, None]
        logits[:, 4] = -1  # neither there nor predicted
        labels = torch.where(unknown, NAN, labels) if kind == "several, some unknown" else labels.long()
    else:
        labels = torch.from_numpy(rng.integers(0, 2 if kind == "two" else 4, count))  # a fifth is predicted only
        labels[torch.from_numpy(rng.random(count) < 0.2)] = -1
        if kind == "a column of floats":
            labels = torch.where(labels < 0, NAN, labels.float()).unsqueeze(1)
    if kind != "several":
        labels[masks["test"]] = NAN if labels.is_floating_point() else -7
    return Nodes(labels, logits, masks, counts)


def measure(nodes: Nodes):
    nodes = nodes.of(sar.rank())
    logits = nodes.logits.requires_grad_()
    task = sar.Task(nodes.labels, {name: mask.byte() for name, mask in nodes.masks.items()})
    loss = task.loss(logits)
    loss.backward()
    areas = {part: task.roc_auc(logits, part) for part in PARTS} if logits.shape[1] == 2 or task.multi_label else None
    assert task.accuracy(logits, "val") == task.metrics(logits)["val"]["accuracy"]
    return task.num_classes, task.sizes, loss.item(), logits.grad, task.metrics(logits), areas


def f1_scores(pairs, classes, multi_label):
    """Micro and macro; `pairs` are the sets of classes that a node has and that are predicted."""
    tables = []
    for c in classes:
        both = sum(c in has and c in said for has, said in pairs)
        tables.append((2 * both, sum(c in has for has, _ in pairs) + sum(c in said for _, said in pairs)))
    scores = [twice / either if either else 0.0 for twice, either in tables if either or multi_label]
    micro = sum(twice for twice, _ in tables) / max(sum(either for _, either in tables), 1)
    return micro, sum(scores) / len(scores)


def area(positive, negative):
    wins = [(p > n) + (p == n) / 2 for p, n in itertools.product(positive, negative)]
    return sum(wins) / len(wins) if wins else NAN


def expected_of(nodes: Nodes, part: str):
    """Metrics and areas of one mask, node by node."""
    multi_label = nodes.labels.dim() == 2 and nodes.labels.shape[1] > 1
    rows = nodes.masks[part].nonzero().flatten().tolist()
    labels, logits = nodes.labels.tolist(), nodes.logits.tolist()
    labels = [[label[0]] if not multi_label and isinstance(label, list) else label for label in labels]
    columns = range(nodes.logits.shape[1])
    pairs = []
    for row in rows:
        if multi_label:
            known = [c for c in columns if labels[row][c] >= 0]
            pair = {c for c in known if labels[row][c] == 1}, {c for c in known if logits[row][c] > 0}
        else:
            label = labels[row][0] if isinstance(labels[row], list) else labels[row]
            known = [label] if label >= 0 else []
            pair = {label}, {logits[row].index(max(logits[row]))}
        pairs += [pair] if known else []
    if not pairs:
        return dict.fromkeys(("accuracy", "f1_micro", "f1_macro"), NAN), NAN, 0
    accuracy = sum(has == said for has, said in pairs) / len(pairs)
    micro, macro = f1_scores(pairs, columns, multi_label)
    of_columns = [
        area(*([logits[row][c] for row in rows if labels[row][c] == kind] for kind in (1, 0)))
        for c in (columns if multi_label else ())
    ]
    if not multi_label and len(columns) == 2:
        of_columns = [area(*([logits[r][1] - logits[r][0] for r in rows if labels[r] == kind] for kind in (1, 0)))]
    defined = [value for value in of_columns if not math.isnan(value)]
    mean = sum(defined) / len(defined) if defined else NAN
    return {"accuracy": accuracy, "f1_micro": micro, "f1_macro": macro}, mean, len(pairs)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["one", "two", "a column of floats", "several", "several, some unknown"])
def test_loss_and_metrics_are_those_of_all_nodes(pool, kind, world_size):
    nodes = nodes_of(kind, world_size)
    results = pool.run(measure, nodes)
    logits, train = nodes.logits.clone().requires_grad_(), nodes.masks["train"]
    if kind.startswith("several"):
        known = train.unsqueeze(1) & (nodes.labels >= 0)
        loss = functional.binary_cross_entropy_with_logits(logits[known], nodes.labels[known].double())
    else:
        labels = nodes.labels.flatten()
        known = train & (labels >= 0)
        loss = functional.cross_entropy(logits[known], labels[known].long())
    loss.backward()
    assert sum(share for _, _, share, *_ in results) == pytest.approx(loss.item(), rel=1e-13)
    torch.testing.assert_close(torch.cat([grad for *_, grad, _, _ in results]), logits.grad, rtol=1e-12, atol=0)
    expected = {part: expected_of(nodes, part) for part in PARTS}
    for num_classes, sizes, _, _, metrics, areas in results:
        assert num_classes == {"one": 4, "two": 2, "a column of floats": 4}.get(kind, 5)
        for part, (of_part, of_columns, count) in expected.items():
            assert sizes[part] == count
            assert metrics[part] == pytest.approx(of_part, rel=1e-14, nan_ok=True)
            assert areas is None or areas[part] == pytest.approx(of_columns, rel=1e-14, nan_ok=True)
    assert kind == "several" or expected["test"][2] == 0  # what is unknown counts nowhere


def half_precision_losses():
    """Of 100,000 nodes; the sum of their losses is more than float16 has."""
    labels = torch.arange(100_000) % 3
    logits = torch.randn(100_000, 3, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    found = []
    for of_nodes in (labels, torch.nn.functional.one_hot(labels)):
        loss = sar.Task(of_nodes, {"train": labels >= 0}).loss(logits)
        if of_nodes.dim() == 1:
            wide = torch.nn.functional.cross_entropy(logits.double(), labels)
        else:
            wide = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), of_nodes.double())
        found += [(one.item(), torch.autograd.grad(one, logits)[0]) for one in (loss, wide)]
    return found


@pytest.mark.parametrize("world_size", [1])
def test_losses_of_half_precision(pool):
    [[found, expected, several, expected_several]] = pool.run(half_precision_losses)
    for (loss, grad), (wide, wide_grad) in ((found, expected), (several, expected_several)):
        assert loss == pytest.approx(wide, rel=1e-4)
        torch.testing.assert_close(grad, wide_grad, rtol=0.01, atol=1e-7)


def broken(number):
    mask = {"train": torch.tensor([True, False])}
    task, unlabelled = sar.Task(torch.tensor([0, 1]), mask), sar.Task(torch.tensor([-1, 1]), mask)
    wrong = sar.rank() == 1 or sar.world_size() == 1
    call, *arguments = [
        (sar.Task, torch.tensor([0.5 if wrong else 0.0, 1.0]), mask),
        (sar.Task, torch.tensor([[2, 0], [1, 0]]), mask),
        (sar.Task, torch.zeros(2, 2, 2), mask),
        (sar.Task, torch.tensor([0, 1]), {"train": torch.ones(3)}),
        (unlabelled.loss, torch.zeros(2, 2)),
        (task.loss, torch.zeros(2, 1)),
        (task.metrics, torch.zeros(3, 2)),
        (task.accuracy, torch.zeros(2, 2), "valid"),
        (task.roc_auc, torch.zeros(2, 3), "train"),
    ][number]
    return catch_and_recover(call, *arguments)


@pytest.mark.parametrize("world_size, number", [*((1, number) for number in range(9)), (2, 0)])
def test_what_is_refused(pool, world_size, number):
    """On all workers, if it is wrong on one."""
    kinds = [failure.kind for failure in pool.run(broken, number)]
    assert kinds == ["PeerError"] * (world_size - 1) + ["FieldError"]


def half_known():
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sar.train.task.logger.warning", lambda text, *values: said.append(text % values))
        sar.Task(torch.tensor([-1, 1, -1]), {"train": torch.tensor([True, True, False])})
        sar.Task(torch.tensor([0, 1]), {"train": torch.tensor([True, False])})
    return said


@pytest.mark.parametrize("world_size", [2])
def test_nodes_of_masks_without_labels_are_counted_once(pool, world_size):
    text = "2 nodes in the masks have no known label (negative or NaN), and are ignored."
    assert pool.run(half_known) == [[text], []]


def of_partition(json_file, ntype):
    parts = list(range(2))[sar.rank() :: sar.world_size()]  # none on worker 2
    data = sar.load_dgl_partition_data(json_file, sar.rank(), "cpu", parts=parts)
    failure = catch_and_recover(sar.Task.of, data) if ntype else None  # for want of the type
    task = sar.Task.of(data, ntype)
    names = ("label", "train_mask", "test_mask")
    label, *masks = (data[f"{ntype}/{name}" if ntype else name] for name in names)
    of_pyg = sar.Task.of(Data(y=label, **dict(zip(names[1:], masks, strict=True))))
    assert torch.equal(of_pyg.labels, task.labels)
    renamed = {name.replace("label", "y"): rows for name, rows in data.node_features.items()}
    assert torch.equal(sar.Task.of(data._replace(node_features=renamed), ntype).labels, task.labels)
    if ntype is None:
        typed = HeteroData({"a": {"x": label}, "b": {"y": label}})
        assert torch.equal(sar.Task.of(typed).labels, task.labels)
        typed["a"].y = label
        assert "2 node types have labels `y`" in catch_and_recover(sar.Task.of, typed).message
        assert torch.equal(sar.Task.of(typed, "a").labels, task.labels)
    assert of_pyg.sizes.items() <= task.sizes.items()
    assert f"{task.num_classes} classes" in repr(task)
    assert all(f"{name} {size:,}" in repr(task) for name, size in task.sizes.items())
    assert f"label {list(label.shape)}" in repr(data)
    return failure, task.labels, task.num_classes, task.sizes


@pytest.mark.parametrize("world_size", [1, 3])
def test_of_a_partition(pool, world_size, tmp_path: Path):
    graph = with_split(community_graph(20, 40, 4, 3))
    json_file = divide(graph, tmp_path, "graph", 2).json_file
    results = pool.run(of_partition, json_file, None)
    labels = graph.node_data["_N"]["label"]
    assert sorted(torch.cat([own for _, own, *_ in results]).tolist()) == sorted(labels.tolist())
    for _, _, num_classes, sizes in results:
        assert num_classes == labels.max() + 1
        assert sizes == {part: graph.node_data["_N"][f"{part}_mask"].sum() for part in PARTS}


@pytest.mark.parametrize("world_size", [2])
def test_of_one_type_of_several(pool, tmp_path: Path):
    rng = np.random.default_rng(0)
    counts = {"paper": 9, "author": 7, "prize": 1}
    edges = {("author", "writes", "paper"): ArrayEdges(rng.integers(0, 7, 30), rng.integers(0, 9, 30))}
    fields = {
        "paper": {"label": rng.integers(0, 3, 9), "train_mask": np.arange(9) < 4, "test_mask": np.arange(9) >= 4},
        "author": {"label": np.full((7, 2), 1.0), "train_mask": np.full(7, True), "test_mask": np.full(7, False)},
    }
    json_file = divide(GraphSource(counts, edges, fields, {}), tmp_path, "typed", 2).json_file
    for failure, labels, num_classes, sizes in pool.run(of_partition, json_file, "paper"):
        assert "Several features are called 'label'" in failure.message
        assert labels.dim() == 1
        assert num_classes == fields["paper"]["label"].max() + 1
        assert sizes == {"train": 4, "test": 5}
    alone = {"author": fields["author"]}
    json_file = divide(GraphSource(counts, edges, alone, {}), tmp_path / "alone", "typed", 2).json_file
    for _, _, num_classes, sizes in pool.run(of_partition, json_file, None):
        assert (num_classes, sizes) == (2, {"train": 7, "test": 0})
