"""`sar.Task`: node classification, with loss and metrics over the nodes of all workers."""

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
from sar.logging_setup import logger
from sar.train.metrics import roc_auc


class Task:
    """Labels and masks of this worker's nodes, with counts over all workers. All workers must create it together.

    Negative and NaN labels are unknown, and ignored.

    Args:
        labels: one class per node, 0, 1, ..., (N_i,) or (N_i, 1); or for multi-label tasks 0 and 1, (N_i, C).
        masks: masks by name, such as train and val: (N_i,) each, bool or 0 and 1.

    Attributes:
        labels: (N_i,) int64, -1 if unknown; or (N_i, C), unchanged.
        masks: (N_i,) bool each, without nodes whose labels are all unknown.
        sizes: the number of nodes in each mask, over all workers.
        num_classes: C, or one more than the highest class on any worker.
        multi_label: whether labels are (N_i, C).

    Raises:
        FieldError: for invalid labels, or a mask of another shape.
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
            unknown = sum(int((mask.bool() & ~some_known).sum()) for mask in masks.values())
            if (unknown := all_sum(unknown)) and group.rank == 0:
                logger.warning("%d nodes in the masks have no known label (negative or NaN), and are ignored.", unknown)
            group.has_summed = has_summed  # a task does not mean that its loss is used: `gather_grads` still warns

    @classmethod
    def of(cls, data: PartitionData | Any, ntype: str | None = None) -> "Task":
        """Create the task of a partition from its `label` or `y` and its `train_mask`, `val_mask` and `test_mask`.

        Args:
            data: the partition data, on any device, or `Data` of PyTorch Geometric, with the labels `y`.
            ntype: node type; optional if only one type has labels and masks.

        Raises:
            FieldError: no type has labels, or several do.
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
                    f"There are no labels {prefix + name!r}; found {sorted(data.node_features)}. Pass labels and "
                    "masks: sar.Task(labels, {'train': mask})."
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
        """Return this worker's share of the mean loss over a mask of all workers. Not a collective call.

        The sum over workers is the mean: of cross-entropy over nodes, or for multi-label tasks of binary cross-entropy
        over known labels.

        Args:
            logits: (N_i, C), before softmax or sigmoid, on the device of the labels.
            split: name of the mask.

        Returns:
            A scalar, float32 if logits have half precision; 0 with a zero gradient if this worker has no node in the
            mask.

        Raises:
            FieldError: the mask is empty on all workers, or the logits have another shape.
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
        """Compute metrics of each mask over the nodes of all workers, counted in integers. A collective call.

        Args:
            logits: as for `loss`. The predicted class has the highest logit; for multi-label tasks, all above 0 are
                predicted.

        Returns:
            By name of the mask: `accuracy`, the fraction of nodes whose known labels are all predicted, and `f1_micro`
            and `f1_macro`, with scikit-learn's defaults; NaN for an empty mask.

        Raises:
            FieldError: the logits have another shape.
        """
        return self._measure(logits, list(self.masks))

    def accuracy(self, logits: Tensor, split: str) -> float:
        """Accuracy on the mask `split`, from 0 to 1; otherwise like `metrics`."""
        return self._measure(logits, [split])[split]["accuracy"]

    @torch.no_grad()
    def roc_auc(self, logits: Tensor, split: str) -> float:
        """Area under the ROC curve on one mask. A collective call.

        For multi-label tasks, the mean over columns with both labels, as in the Open Graph Benchmark (Hu et al., 2020,
        arXiv:2005.00687). With two classes, the second is the positive one.

        Args:
            logits: as for `loss`.
            split: name of the mask.

        Returns:
            From 0 to 1, by `sar.train.metrics.roc_auc`; NaN if no column has both labels.

        Raises:
            FieldError: the task has more than two classes, or the logits have another shape.
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
        """The labels that count in a mask, in the shape of `labels`."""
        return self.masks[split].unsqueeze(1) & self._known if self.multi_label else self.masks[split]

    def _check(self, logits: Tensor, split: str) -> None:
        if split not in self.masks:
            raise FieldError(f"There is no mask {split!r}; expected one of {list(self.masks)}.")
        rows, columns = logits.shape if logits.dim() == 2 else (-1, -1)
        if rows != len(self.labels) or columns < self.num_classes or (self.multi_label and columns > self.num_classes):
            raise FieldError(
                f"The logits are {tuple(logits.shape)}; expected {(len(self.labels), self.num_classes)}: this worker's "
                "nodes, and the classes, which are two for binary classification."
            )

    @torch.no_grad()
    def _measure(self, logits: Tensor, splits: Sequence[str]) -> dict[str, dict[str, float]]:
        with session.current_group().guard():
            for split in splits:
                self._check(logits, split)
            counts = all_sum({split: self._counts(logits, split) for split in splits})
        return {split: self._scores(counts[split], self._sizes[split]) for split in splits}

    def _counts(self, logits: Tensor, split: str) -> Tensor:
        """Labels predicted correctly, predicted, and true, by class, (C, 3); then the number of right nodes, (1, 3)."""
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
