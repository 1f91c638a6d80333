"""A graph attention network, trained on one machine in plain DGL; the script is as a user of DGL would write it."""

import sys

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import GATConv
from utils import EarlyStopping, load_checkpoint, save_checkpoint


class GAT(torch.nn.Module):
    def __init__(self, num_features, hidden, heads, num_classes):
        super().__init__()
        self.first = GATConv(num_features, hidden, heads, activation=F.elu)
        self.last = GATConv(hidden * heads, num_classes, 1)

    def forward(self, graph, x):
        return self.last(graph, self.first(graph, x).flatten(1)).mean(1)


def main(path, checkpoint, epochs=100):
    torch.manual_seed(0)
    graph = dgl.load_graphs(path)[0][0]
    x, labels = graph.ndata["feat"], graph.ndata["label"]
    masks = {part: graph.ndata[f"{part}_mask"].bool() for part in ("train", "val", "test")}

    def evaluate(part):
        model.eval()
        with torch.no_grad():
            return (model(graph, x).argmax(1) == labels)[masks[part]].float().mean().item()

    model = GAT(x.shape[1], 8, 4, int(labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    stop = EarlyStopping(patience=10)
    first = load_checkpoint(checkpoint, model, optimizer, stop)
    for epoch in range(first, epochs):
        model.train()
        logits = model(graph, x)
        loss = F.cross_entropy(logits[masks["train"]], labels[masks["train"]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = evaluate("val")
        print(f"epoch {epoch}: loss {loss:.8f}, validation accuracy {accuracy:.4f}")
        done = stop.step(accuracy, model)
        save_checkpoint(checkpoint, model, optimizer, stop, epoch + 1)
        if done:
            break
    stop.load_best(model)
    print(f"test accuracy {evaluate('test'):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
