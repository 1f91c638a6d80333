"""`sar.Task`: classes of nodes to learn, with a loss and metrics over the nodes of all workers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import all_max, all_sum
from sar.comm.gradients import refuse_average
from sar.common_tuples import SPLIT, PartitionData, suffix_key_lookup
from sar.errors import FieldError
from sar.kernels import accumulation_dtype
from sar.train.metrics import roc_auc


class Task:
    """Labels and masks of this worker's nodes, with counts over all workers; made by all workers together.

    A label is unknown if it is negative or NaN; such labels are ignored.

    Args:
        labels: one class for each node, 0, 1, ..., (N_i,) or (N_i, 1); or, if nodes may have several of C classes
            (multi-label), 0 and 1 in (N_i, C).
        masks: which nodes to train on, to validate on and so on, by name: (N_i,) each, bool or 0 and 1.

    Attributes:
        labels: (N_i,) int64, -1 if unknown; or (N_i, C) as given.
        masks: (N_i,) bool each, without nodes that have no known label.
        sizes: the number of nodes in each mask, over all workers.
        num_classes: C, or one more than the highest class on any worker.
        multi_label: whether labels are (N_i, C).

    Raises:
        FieldError: for labels that are no classes, or a mask of another shape.
    """

    def __init__(self, labels: Tensor, masks: Mapping[str, Tensor]) -> None:
        with session.current_group().guard() as group:
            has_summed = group.has_summed
            labels = labels.squeeze(1) if labels.dim() == 2 and labels.shape[1] == 1 else labels
            self.multi_label = labels.dim() == 2
            self._known = labels >= 0  # not if NaN
            classes = labels > 0 if self.multi_label else labels.long()
            if labels.dim() not in (1, 2) or (self._known & (labels != classes)).any():
                raise FieldError(
                    f"The labels are {labels.dtype} {tuple(labels.shape)}, and not all are classes; expected one of "
                    "0, 1, ... for each node, or several columns of 0 and 1."
                )
            for name, mask in masks.items():
                if mask.shape != labels.shape[:1]:
                    raise FieldError(f"{name} is {tuple(mask.shape)}; expected {tuple(labels.shape[:1])}, one a node.")
            self.labels = labels if self.multi_label else torch.where(self._known, classes, -1)
            some_known = self._known.any(1) if self.multi_label else self._known
            self.masks = {name: mask.bool() & some_known for name, mask in masks.items()}
            if self.multi_label:
                self.num_classes = labels.shape[1]
            else:
                self.num_classes = all_max(int(self.labels.max()) if len(labels) else -1) + 1
            self._sizes = all_sum({name: int(mask.sum()) for name, mask in self.masks.items()})
            self._terms = all_sum({name: int(self._entries(name).sum()) for name in self.masks})
            group.has_summed = has_summed  # a loss may still be one of its own: `gather_grads` warns of it

    @classmethod
    def of(cls, data: PartitionData | Any, ntype: str | None = None) -> "Task":
        """The task that comes with a partition: its `label` or `y`, and its `train_mask`, `val_mask`, `test_mask`.

        Args:
            data: as loaded, on any device; or PyTorch Geometric's `Data`, whose labels are `y`.
            ntype: type of the nodes; may be left out if only one type has these fields.

        Raises:
            FieldError: if there are no labels, or several types have them.
        """
        with session.current_group().guard():
            if not isinstance(data, PartitionData):
                stores = [store for store in (data.node_stores if ntype is None else [data[ntype]]) if "y" in store]
                if len(stores) != 1:
                    raise FieldError(
                        f"{len(stores)} node types have labels `y`; expected one: name it, Task.of(data, ntype), or "
                        "give labels and masks, sar.Task(labels, {'train': mask})."
                    )
                [store] = stores
                return cls(store.y, {name.removesuffix("_mask"): store[name] for name in SPLIT if name in store})
            prefix = "" if ntype is None else f"{ntype}/"
            name = "y" if f"{prefix}y" in data and f"{prefix}label" not in data else "label"
            if name not in data:
                raise FieldError(
                    f"There are no labels {prefix + name!r}; there is {sorted(data.node_features)}. Give labels and "
                    "masks, sar.Task(labels, {'train': mask})."
                )
            labels = suffix_key_lookup(data.node_features, prefix + name)
            names = [name for name in SPLIT if prefix + name in data]
            masks = {name.removesuffix("_mask"): suffix_key_lookup(data.node_features, prefix + name) for name in names}
        return cls(labels, masks)

    @property
    def sizes(self) -> dict[str, int]:
        session.current_group().has_summed = True
        return self._sizes

    def __repr__(self) -> str:
        masks = "".join(f", {name} {size:,} of all nodes" for name, size in self._sizes.items())
        return f"Task({self.num_classes} classes, labels {tuple(self.labels.shape)} here{masks})"

    def loss(self, logits: Tensor, split: str = "train") -> Tensor:
        """This worker's share of the mean loss over all workers' nodes of a mask; not a collective call.

        The shares add up to the mean: of the cross-entropy of nodes; multi-label, of the binary cross-entropy of all
        known labels.

        Args:
            logits: (N_i, C), before softmax or sigmoid; on the labels' device.
            split: name of the mask.

        Returns:
            A scalar, float32 where logits are of half precision; 0 with a gradient of 0 if this worker has no such
            node.

        Raises:
            FieldError: if no worker has such a node, or the logits have another shape.
        """
        self._check(logits, split)
        session.current_group().has_summed = True
        if not self._terms[split]:
            raise FieldError(f"No node in the mask {split!r} has a known label, on any worker.")
        counted = self._entries(split)
        logits, labels = logits[counted].to(accumulation_dtype(logits.dtype)), self.labels[counted]
        if self.multi_label:
            total = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        else:
            total = F.cross_entropy(logits, labels, reduction="sum")
        share = total / self._terms[split]
        if share.requires_grad:
            share.register_hook(lambda _: refuse_average())
        return share

    def metrics(self, logits: Tensor) -> dict[str, dict[str, float]]:
        """Metrics of each mask over all workers' nodes, counted in integers; called by all workers together.

        Args:
            logits: as for `loss`. The predicted class is the one with the highest logit; multi-label, all above 0.

        Returns:
            By name of the mask: `accuracy`, the share of nodes with all known labels predicted, `f1_micro` and
            `f1_macro`, as by default in scikit-learn; NaN if no worker has such a node.

        Raises:
            FieldError: if the logits have another shape.
        """
        return self._measure(logits, list(self.masks))

    def accuracy(self, logits: Tensor, split: str) -> float:
        """The share, 0 to 1, of the nodes of the mask `split` that are predicted right; otherwise as `metrics`."""
        return self._measure(logits, [split])[split]["accuracy"]

    @torch.no_grad()
    def roc_auc(self, logits: Tensor, split: str) -> float:
        """The area under the ROC curve of one mask; called by all workers together.

        Multi-label, the mean over the columns that have both labels, as in the Open Graph Benchmark (Hu et al., 2020,
        arXiv:2005.00687). With two classes, of the second against the first.

        Args:
            logits: as for `loss`.
            split: name of the mask.

        Returns:
            From 0 to 1, by `sar.train.metrics.roc_auc`; NaN if no column has both labels.

        Raises:
            FieldError: if each node has one of more than two classes, or the logits have another shape.
        """
        with session.current_group().guard():
            self._check(logits, split)
            if self.multi_label:
                columns = list(zip(logits.T, self.labels.T, self._entries(split).T, strict=True))
            elif logits.shape[1] == 2:
                columns = [(logits.double().diff().squeeze(1), self.labels, self.masks[split])]
            else:
                raise FieldError(f"There are {logits.shape[1]} classes; expected two, or several columns of labels.")
            areas = [roc_auc(score[of & (label == 1)], score[of & (label == 0)]) for score, label, of in columns]
        areas = [area for area in areas if not math.isnan(area)]
        return sum(areas) / len(areas) if areas else float("nan")

    def _entries(self, split: str) -> Tensor:
        """Which labels count in a mask, of the shape of `labels`."""
        return self.masks[split].unsqueeze(1) & self._known if self.multi_label else self.masks[split]

    def _check(self, logits: Tensor, split: str) -> None:
        if split not in self.masks:
            raise FieldError(f"There is no mask {split!r}; expected one of {list(self.masks)}.")
        rows, columns = logits.shape if logits.dim() == 2 else (-1, -1)
        if rows != len(self.labels) or columns < self.num_classes or (self.multi_label and columns > self.num_classes):
            raise FieldError(
                f"The logits are {tuple(logits.shape)}; expected {(len(self.labels), self.num_classes)}: this worker's "
                "nodes, and classes, of which a yes-or-no question has two."
            )

    @torch.no_grad()
    def _measure(self, logits: Tensor, splits: Sequence[str]) -> dict[str, dict[str, float]]:
        with session.current_group().guard():
            for split in splits:
                self._check(logits, split)
            counts = all_sum({split: self._counts(logits, split) for split in splits})
        return {split: self._scores(counts[split], self._sizes[split]) for split in splits}

    def _counts(self, logits: Tensor, split: str) -> Tensor:
        """For each class the labels predicted rightly, predicted, and there, (C, 3); below it right nodes, (1, 3)."""
        mask = self.masks[split]
        logits, labels = logits[mask], self.labels[mask]
        if self.multi_label:
            there, predicted = labels == 1, self._known[mask] & (logits > 0)
            right = (there == predicted).all(1)
            table = torch.stack([(there & predicted).sum(0), predicted.sum(0), there.sum(0)], 1)
        else:
            predicted = logits.argmax(1)
            right = predicted == labels
            kinds = (labels[right], predicted, labels)
            table = torch.stack([kind.bincount(minlength=logits.shape[1]) for kind in kinds], 1)
        return torch.cat([table, right.sum().expand(1, 3)])

    def _scores(self, counts: Tensor, nodes: int) -> dict[str, float]:
        if not nodes:
            return dict.fromkeys(("accuracy", "f1_micro", "f1_macro"), float("nan"))
        *table, (right, _, _) = counts.tolist()
        rightly, either = [2 * row[0] for row in table], [row[1] + row[2] for row in table]
        classes = [i for i in range(len(table)) if self.multi_label or either[i]]  # which scikit-learn takes
        macro = sum(rightly[i] / max(either[i], 1) for i in classes) / len(classes)
        return {"accuracy": right / nodes, "f1_micro": sum(rightly) / max(sum(either), 1), "f1_macro": macro}
