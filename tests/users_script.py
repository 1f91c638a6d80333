"""What users write, which `mypy --strict` accepts: fields, scopes, relations, types of nodes and edges.

Nobody runs it. It is among the files of mypy in pyproject.toml, because a check apart would read torch once more.
"""

from typing import cast

from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Module
from torch.optim import Optimizer

import sar


def fields(data: sar.PartitionData, x: Tensor) -> Tensor:
    g = sar.construct_full_graph(data)
    g.srcdata["h"] = x
    with g.local_scope():
        g.ndata["h"] = g.ndata["h"] + 1
        g.dstdata["h"] = g.srcdata["h"] * 2
        g.edata["w"] = g.edata["w"].float() / g.edata.pop("norm")
        for name, values in g.ndata.items():
            print(name, values.shape)
        g.edata.update(weight=x)
    return g.dstdata["h"]


def fields_of_types(data: sar.PartitionData, x: Tensor) -> Tensor:
    g = sar.construct_full_graph(data)
    g.nodes["paper"].data["h"] = x
    g.srcnodes["paper"].data["h"] = g.dstnodes["author"].data["h"] + 1
    weight = g.edges["cites"].data["w"]
    g.edges["paper", "cites", "paper"].data["w"] = weight + g.nodes["paper"].data["h"]
    g.srcdata["h"] = {"paper": x}
    by_type = cast("dict[str, Tensor]", g.ndata["h"])
    return by_type["paper"] + g.nodes("paper")


def graphs(data: sar.PartitionData, seeds: Tensor) -> list[sar.GraphShardManager]:
    g = sar.construct_full_graph(data)
    block: sar.DistributedBlock = g["cites"].to("cpu").local_var().get_full_partition_graph()
    layers = sar.construct_mfgs(data, seeds, n_layers=2)
    layers[0].srcdata["h"] = block.srcdata["h"][layers[0].input_nodes] + block.num_nodes()
    return layers


def helpers(data: sar.PartitionData, model: Module, optimizer: Optimizer) -> float:
    sar.seed(0)
    task, stop = sar.Task.of(data), sar.EarlyStopping(patience=5, mode="min")
    sar.load_checkpoint("checkpoints", model=model, optimizer=optimizer, loaders=stop, missing_ok=True)
    logits: Tensor = model(sar.construct_full_graph(data), data["feat"])
    loss = task.loss(logits)
    if stop.step(sar.all_sum(loss.item()), model):
        stop.load_best(model)
    right, count = sar.all_sum((1, 2.0))
    sar.print(sar.all_sum(loss) + sar.all_max(logits), right / count, end="")
    return task.accuracy(logits, "val") + task.metrics(logits)["test"]["f1_macro"]


def train(path: str, model: Module) -> Tensor:
    sar.initialize_comms()
    sar.patch_dgl()
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    x = sar.suffix_key_lookup(data.node_features, "feat")
    g = sar.construct_full_graph(data)
    sar.sync_params(model)
    sampler = sar.DistNeighborSampler([10, 10], input_node_features={"feat": x})
    for blocks in sar.DataLoader(g, x, sampler, batch_size=10, shuffle=True):
        print(blocks[0])
    loss: Tensor = model(g, x)
    sar.gather_grads(model)
    sar.comm.all_reduce(loss, ReduceOp.SUM)
    return sar.edge_softmax(g, g.edata["w"]) * loss


def mistakes(g: sar.GraphShardManager) -> None:
    """Each is found: mypy also tells of an `ignore` that ignores nothing."""
    g.ndata["h"] = 1  # type: ignore[assignment]
    print(g.ndata["h"].paper)  # type: ignore[attr-defined]
    print(g.nodes["paper"].data[0])  # type: ignore[index]
    g.srcdata = {}  # type: ignore[assignment, misc]
