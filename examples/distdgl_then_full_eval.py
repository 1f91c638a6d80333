"""DistDGL's mini-batch training, then the exact accuracy on the whole graph, in the same processes.

    python examples/distdgl_cluster.py --partition-json partitions/cora/cora.json examples/distdgl_then_full_eval.py

tries it on this machine. DGL's launcher starts it on several, with as many trainers on each as you like; then leave out
the first import, and name the files by --ip-config and --partition-json. What sar adds stands at the end of `main`.
"""

import distdgl_cluster  # noqa: F401  # isort: skip  (makes one machine stand for several)
import sar  # isort: skip  (before dgl)
import argparse
import json
import os
from pathlib import Path
from typing import Any

import dgl.distributed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import accuracies
from minibatch import GraphSAGE
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ip-config", default=os.environ.get("DGL_IP_CONFIG"), help="a line for each machine")
parser.add_argument("--partition-json", default=os.environ.get("DGL_CONF_PATH"), help="of the partition directory")
parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10], help="for each layer (10 10)")
parser.add_argument("--batch-size", type=int, default=100, help="of each trainer (%(default)s)")
parser.add_argument("--epochs", type=int, default=20, help="(%(default)s)")
parser.add_argument("--hidden", type=int, default=64, help="(%(default)s)")
parser.add_argument("--lr", type=float, default=0.01, help="(%(default)s)")
parser.add_argument("--parameters", help="a file to write the trained parameters to")


def train(model: DistributedDataParallel, graph: Any, arguments: argparse.Namespace) -> None:
    """Train on sampled neighbors, as in any DistDGL script."""
    nodes = dgl.distributed.node_split(graph.ndata["train_mask"], graph.get_partition_book(), force_even=True)
    sampler = dgl.dataloading.NeighborSampler(arguments.fanouts)
    loader = dgl.dataloading.DistNodeDataLoader(graph, nodes, sampler, batch_size=arguments.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    for epoch in range(arguments.epochs):
        losses = [0.0]
        with model.join():  # one trainer may have a batch more than another
            for inputs, seeds, blocks in loader:
                logits = model(blocks, graph.ndata["feat"][inputs])
                loss = F.cross_entropy(logits, graph.ndata["label"][seeds])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the last batch {losses[-1]:.6f}", flush=True)


def main() -> None:
    arguments = parser.parse_args()
    dgl.distributed.initialize(arguments.ip_config)  # a server stays in here until the trainers have left
    dist.init_process_group("gloo")
    dist_graph = dgl.distributed.DistGraph(json.loads(Path(arguments.partition_json).read_text())["graph_name"])
    highest = dist_graph.ndata["label"].local_partition.max()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    torch.manual_seed(0)
    model = GraphSAGE(dist_graph.ndata["feat"].shape[1], arguments.hidden, int(highest) + 1, len(arguments.fanouts))
    train(DistributedDataParallel(model), dist_graph, arguments)

    sar.initialize_comms()
    graph = sar.convert_dist_graph(dist_graph)  # this trainer's part, with its features
    model.eval()
    with torch.no_grad():
        logits = model([graph] * len(arguments.fanouts), graph.ndata["feat"])
    masks = {part: graph.ndata[f"{part}_mask"] for part in ("train", "val", "test")}
    task = sar.Task(graph.ndata["label"], masks)
    sar.print("on the whole graph:", accuracies(task, logits))
    if arguments.parameters and sar.rank() == 0:
        torch.save(model.state_dict(), arguments.parameters)


if __name__ == "__main__":
    main()
