"""What a user of DGL has at hand for any script: early stopping, and checkpoints to go on from."""

import copy
import os

import torch


class EarlyStopping:
    """Stop when the score has not risen for `patience` epochs; keep the best model."""

    def __init__(self, patience=10):
        self.patience, self.waited, self.best, self.best_model = patience, 0, float("-inf"), None

    def step(self, score, model):
        self.waited += 1
        if score > self.best:
            self.waited, self.best, self.best_model = 0, score, copy.deepcopy(model.state_dict())
        return self.waited >= self.patience

    def load_best(self, model):
        model.load_state_dict(self.best_model)


def save_checkpoint(file, model, optimizer, stop, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "stop": vars(stop), "epoch": epoch}
    torch.save(state, file)


def load_checkpoint(file, model, optimizer, stop):
    if not os.path.exists(file):
        return 0
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    vars(stop).update(state["stop"])
    return state["epoch"]
