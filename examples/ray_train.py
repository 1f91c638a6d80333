"""Full-graph training under Ray Train: the loop of `full_graph.py` as a function that each of Ray's workers calls.

    pip install -c constraints.txt '.[dgl,ray]'      # in a clone of the repository
    python examples/ray_train.py --partition-json partitions/cora/cora.json --workers 2 --checkpoint checkpoints

On a cluster, `--partition-json` and `--checkpoint` lie on a file system that all hosts share. Where a worker dies, Ray
starts all of them again, and they go on from the last epoch.
"""

import argparse
import os
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--partition-json", required=True, help="the JSON file of a partition directory")
parser.add_argument("--checkpoint", metavar="DIR", required=True, help="save every epoch to DIR, and resume from it")
parser.add_argument("--workers", type=int, default=2, help="best one per partition (%(default)s)")
parser.add_argument("--cpus", type=int, default=1, help="cores and threads of a worker (%(default)s)")
parser.add_argument("--max-failures", type=int, default=1, help="how often to start again (%(default)s)")
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.01)


def train(config: dict[str, Any]) -> float:
    """Train on one worker, and return the test accuracy. Imports are inside because it runs in another process."""
    import sar  # isort: skip  (before dgl)
    import dgl.nn
    import torch

    class GraphSAGE(torch.nn.Module):
        def __init__(self, num_features: int, hidden: int, num_classes: int):
            super().__init__()
            self.first = dgl.nn.SAGEConv(num_features, hidden, "mean")
            self.last = dgl.nn.SAGEConv(hidden, num_classes, "mean")

        def forward(self, graph, x):  # x: (N_i, F) -> (N_i, C), N_i nodes of this worker's partition
            return self.last(graph, self.first(graph, x).relu())

    sar.initialize_comms()  # uses Ray's process group
    data = sar.load_dgl_partition_data(config["partition_json"], sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    x: Any = data["feat"]
    task = sar.Task.of(data)

    sar.seed(0)
    model = GraphSAGE(x.shape[1], config["hidden"], task.num_classes)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])

    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    first = sar.load_checkpoint(config["checkpoint"], **state, missing_ok=True)["step"]
    for epoch in range(first, config["epochs"]):
        loss = task.loss(model(graph, x))
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        sar.save_checkpoint(config["checkpoint"], **state, step=epoch + 1)
        total = sar.all_sum(loss).item()
        sar.print(f"epoch {epoch}: loss {total:.6f}")
        ray.train.report({"epoch": epoch, "loss": total})

    with torch.no_grad():
        return task.accuracy(model(graph, x), "test")


def main() -> None:
    arguments = vars(parser.parse_args())
    for name in ("partition_json", "checkpoint"):  # workers have separate folders
        arguments[name] = os.path.abspath(arguments[name])
    trainer = TorchTrainer(
        train,
        train_loop_config=arguments,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=arguments["workers"], resources_per_worker={"CPU": arguments["cpus"]}),
        run_config=RunConfig(
            storage_path=arguments["checkpoint"],
            failure_config=FailureConfig(max_failures=arguments["max_failures"]),
        ),
    )
    print(f"test accuracy {trainer.fit().return_value:.4f}")


if __name__ == "__main__":
    main()
