"""A graph attention network, trained on any number of workers: `gat_in_dgl.py`, ported."""

import sys

import sar  # isort: skip  (before dgl)
import torch
import torch.nn.functional as F
from dgl.nn import GATConv
from sar import EarlyStopping, print


class GAT(torch.nn.Module):
    def __init__(self, num_features, hidden, heads, num_classes):
        super().__init__()
        self.first = GATConv(num_features, hidden, heads, activation=F.elu)
        self.last = GATConv(hidden * heads, num_classes, 1)

    def forward(self, graph, x):
        return self.last(graph, self.first(graph, x).flatten(1)).mean(1)


def main(path, checkpoint, epochs=100):
    sar.initialize_comms()
    sar.seed(0)
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    graph, x, task = sar.construct_full_graph(data), data["feat"], sar.Task.of(data)

    def evaluate(part):
        model.eval()
        with torch.no_grad():
            return task.accuracy(model(graph, x), part)

    model = GAT(x.shape[1], 8, 4, task.num_classes)
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    stop = EarlyStopping(patience=10)
    first = sar.load_checkpoint(checkpoint, model=model, optimizer=optimizer, loaders=stop, missing_ok=True)["step"]
    for epoch in range(first, epochs):
        model.train()
        logits = model(graph, x)
        loss = task.loss(logits)
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        accuracy = evaluate("val")
        print(f"epoch {epoch}: loss {sar.all_sum(loss):.8f}, validation accuracy {accuracy:.4f}")
        done = stop.step(accuracy, model)
        sar.save_checkpoint(checkpoint, model=model, optimizer=optimizer, loaders=stop, step=epoch + 1)
        if done:
            break
    stop.load_best(model)
    print(f"test accuracy {evaluate('test'):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
