"""The models that `sar plan` knows, as widths: what their layers exchange, keep and compute with.

[Note: rows of a layer]
Memory is counted in numbers for each own node. i and o are a layer's input and output width. What a layer keeps for the
backward, and what else is live at its worst moments, follow from DGL's forwards (`SAGEConv` with mean, `GraphConv` with
norm="both", `GATConv` as `patch_dgl` runs it), a ReLU after every layer but the last, and autograd, which runs the
operations backwards and frees what each has saved. No dropout.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from sar.errors import ConfigError
from sar.train.traffic import Exchanged

Kind = Literal["sage", "gcn", "gat"]


class LayerRows(NamedTuple):
    """Numbers for each own node that one layer holds: see [Note: rows of a layer].

    saved: from its forward to its backward, the layer's result included.
    forward: at most during its forward.
    backward: at most during its backward, with what it saved and the gradients on either side.
    """

    saved: int
    forward: int
    backward: int


@dataclass(frozen=True)
class ModelShape:
    """A stack of layers of `dgl.nn`.

    kind: sage (Hamilton et al., 2017), gcn (Kipf and Welling, 2017) or gat (Velickovic et al., 2018).
    widths: features, hidden widths, classes: one more than there are layers.
    heads: of gat: each hidden width is that of all heads side by side, and the last layer has one head.
    """

    kind: Kind
    widths: tuple[int, ...]
    heads: int = 1

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise ConfigError(f"the model has the widths {self.widths}; expected at least two of at least 1.")
        if self.kind == "gat" and any(width % self.heads for width in self.widths[1:-1]):
            raise ConfigError(f"hidden widths {self.widths[1:-1]} cannot be divided among {self.heads} heads.")

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Input and output width of each layer."""
        return list(pairwise(self.widths))

    def exchanged(self) -> list[Exchanged]:
        """What each layer exchanges."""
        if self.kind == "gat":
            return [Exchanged(out, values_read=True) for _, out in self.layers]
        # SAGEConv and GraphConv multiply first where that makes rows narrower, and the product needs a gradient.
        return [Exchanged(min(i, o), constant=k == 0 and i <= o) for k, (i, o) in enumerate(self.layers)]

    def parameter_sizes(self) -> list[int]:
        """Elements of every parameter."""
        sizes = []
        for i, o in self.layers:
            sizes += {"sage": [i * o, i * o, o], "gcn": [i * o, o], "gat": [i * o, o, o, o]}[self.kind]
        return sizes

    def rows(self) -> list[LayerRows]:
        """What each layer holds."""
        count = len(self.layers)
        held = []
        for k, (i, o) in enumerate(self.layers):
            last = k == count - 1
            # The first layer's input needs no gradient; the last layer's result stays, as logits, beside its gradient.
            into, logits = (0 if k == 0 else i), (o if last else 0)
            if self.kind == "gat":
                held.append(_gat(o, into, logits, 1 if last else self.heads))
            else:
                held.append({"sage": _sage, "gcn": _gcn}[self.kind](i, o, into, logits))
        return held


def _sage(i: int, o: int, into: int, logits: int) -> LayerRows:
    """Mean of the neighbours times a matrix, plus own row times another."""
    if i <= o:  # keeps the mean
        relu = i + o + 2 * o - logits
        products = i + o + logits + 2 * into
        return LayerRows(i + o, i + 3 * o, max(relu, products, logits + 3 * into))
    relu = 3 * o - logits
    aggregation, product = 2 * o + logits + into, o + logits + 2 * into
    return LayerRows(o, 4 * o, max(relu, aggregation, product))


def _gcn(i: int, o: int, into: int, logits: int) -> LayerRows:
    """Rows over the square root of out-degrees, summed, times a matrix, over the square root of in-degrees; bias."""
    # Keeps the sum, or where the matrix comes first, the scaled rows.
    relu, scaling = i + 3 * o - logits, i + 2 * o + logits
    product, scaling_back = i + o + logits + into, logits + 2 * into
    forward = 2 * i + 2 * o if i <= o else i + 4 * o
    return LayerRows(i + o, forward, max(relu, scaling, product, scaling_back))


def _gat(o: int, into: int, logits: int, heads: int) -> LayerRows:
    """Projected rows, weighted by attention; the projection is made again in the backward."""
    relu = 4 * o + heads - logits
    attention = 4 * o + 8 * heads + logits
    return LayerRows(2 * o + heads, 3 * o + 5 * heads, max(relu, attention, o + logits + into))
