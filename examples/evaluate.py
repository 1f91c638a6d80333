"""The accuracy of a trained GraphSAGE network on the whole graph, which need not fit in memory, and its logits.

    torchrun --nproc-per-node 2 examples/minibatch.py --partition-json partitions/cora/cora.json --parameters sage.pt
    sar launch --workers 1 --memory 2GiB --spill /local/disk examples/evaluate.py \\
        --partition-json partitions/cora/cora.json --parameters sage.pt --logits logits.npy

Every node uses all of its neighbors, as on one machine. With --memory a process keeps one partition in memory at a
time; without, all workers run in parallel.
"""

import argparse
from typing import Any

import sar  # isort: skip  (before dgl)
import torch
from common import accuracies, load
from minibatch import GraphSAGE

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--partition-json", required=True, help="the JSON file of a partition directory")
parser.add_argument("--parameters", required=True, help="of a GraphSAGE, as examples/minibatch.py writes them")
parser.add_argument("--logits", metavar="FILE", help="an .npy file for (N, C) logits, in the order of the input graph")


def main(argv: list[str] | None = None) -> None:
    arguments = parser.parse_args(argv)
    graph, x, task = load(arguments.partition_json)
    trained = torch.load(arguments.parameters, weights_only=True)
    outputs = [len(rows) for name, rows in trained.items() if name.endswith("fc_self.weight")]
    model = GraphSAGE(x.shape[1], outputs[0], outputs[-1], len(outputs))
    model.load_state_dict(trained)
    with torch.no_grad():
        logits = model.to(x.dtype).eval()([graph] * len(outputs), x)
    sar.print("on the whole graph:", accuracies(task, logits))
    if arguments.logits:
        original_ids: Any = graph.original_ids()  # Any: None if the directory lacks them
        sar.to_original_order(logits, original_ids, out=arguments.logits)


if __name__ == "__main__":
    main()
