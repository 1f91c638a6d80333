"""Softmax over the in-edges of each destination, or the out-edges of each source."""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sar.common_tuples import AnyEtype, CanonicalEtype
from sar.core.collective import Collective, ForwardOutput, uncompiled
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.queries import ALL
from sar.core.passing.at_sources import max_at_sources, sum_at_sources
from sar.core.passing.messages import copy_to_edges
from sar.errors import GraphError
from sar.kernels import EdgeBlock, edge_softmax_backward, edge_softmax_forward


@uncompiled
def edge_softmax(
    graph: GraphShardManager, logits: Tensor | Mapping[AnyEtype, Tensor], eids: Any = ALL, norm_by: str = "dst"
) -> Any:
    """Softmax of edge logits over the edges of each node: exp(x_e) / sum of exp(x_e') over the node's edges e'.

    With `norm_by="dst"`, workers do not communicate, because each has all in-edges of its nodes. `norm_by="src"` is a
    collective call.

    Args:
        graph: a distributed graph.
        logits: (E, *) floating point, in edge order, or (K, *) with `eids`. With several edge types, a dictionary with
            the logits of all types; the softmax then runs over a node's edges of all types.
        eids: local IDs of the edges to include, (K,) integer. Default: all.
        norm_by: `dst` (default) or `src`.

    Returns:
        The softmax in the shape of `logits`, or a dictionary by canonical edge type.

    Raises:
        GraphError: for logits of another length, a dictionary that lacks edge types, or an invalid `norm_by`.
    """
    if norm_by not in ("dst", "src"):
        raise GraphError(f"edge_softmax got norm_by={norm_by!r}; expected 'dst' or 'src'.")
    by_name = logits if isinstance(logits, Mapping) else dict.fromkeys(graph.canonical_etypes[:1], logits)
    by_type = {graph.to_canonical_etype(etype): x for etype, x in by_name.items()}
    chosen = None if isinstance(eids, str) and eids == ALL else torch.as_tensor(eids, device=graph.device).long()
    if len(by_type) < len(graph.canonical_etypes) or (chosen is not None and len(by_type) > 1):
        raise GraphError(f"The logits are of {list(by_type)}; expected all of {graph.canonical_etypes}, without eids.")
    for etype, x in by_type.items():
        count = graph.num_edges(etype)
        if chosen is not None and bool(((chosen < 0) | (chosen >= count)).any()):
            raise GraphError(f"eids are from {int(chosen.min())} to {int(chosen.max())}; expected 0 to {count - 1}.")
        rows = count if chosen is None else len(chosen)
        if x.dim() == 0 or len(x) != rows:
            raise GraphError(f"The logits have shape {tuple(x.shape)}; expected {rows} rows, one for each edge.")
        if not x.dtype.is_floating_point:
            raise GraphError(f"The logits are {x.dtype}; expected floating point.")
        if chosen is not None:  # other edges get the weight exp(-inf) = 0
            by_type[etype] = x.new_full((count, *x.shape[1:]), -torch.inf).index_copy(0, chosen, x)
    end = 2 if norm_by == "dst" else 0
    scores: dict[CanonicalEtype, Tensor] = {}
    for ntype in dict.fromkeys(etype[end] for etype in graph.canonical_etypes):
        etypes = [etype for etype in graph.canonical_etypes if etype[end] == ntype]
        if len({(by_type[etype].dtype, by_type[etype].shape[1:]) for etype in etypes}) > 1:
            raise GraphError(f"The logits of {etypes} share nodes; expected equal widths and dtypes.")
        contexts, own = [graph.call_context(etype) for etype in etypes], [by_type[etype] for etype in etypes]
        of_ntype: Sequence[Tensor]
        if norm_by == "src":
            greatest = reduce(torch.maximum, map(max_at_sources, contexts, own))
            greatest = greatest.masked_fill(greatest == -torch.inf, 0)
            weights = [(x - copy_to_edges(context, greatest)).exp() for context, x in zip(contexts, own, strict=True)]
            total = reduce(torch.add, map(sum_at_sources, contexts, weights))
            of_ntype = [x / copy_to_edges(context, total) for context, x in zip(contexts, weights, strict=True)]
        elif len(own) == 1:
            of_ntype = _EdgeSoftmax(contexts[0].relation.blocks).apply(own[0])
        else:  # one softmax over the edges of all relations, side by side
            sizes = [*map(len, own)]
            relations = zip([0, *accumulate(sizes[:-1])], contexts, strict=True)
            blocks = [block.shifted(start) for start, context in relations for block in context.relation.blocks]
            of_ntype = _EdgeSoftmax(blocks).apply(torch.cat(own))[0].split(sizes)
        scores |= zip(etypes, of_ntype, strict=True)
    if isinstance(logits, Mapping):
        return {etype: scores[etype] for etype in graph.canonical_etypes}
    [scored] = scores.values()
    return scored if chosen is None else scored[chosen]


class _EdgeSoftmax(Collective):
    """The softmax over in-edges, which needs no communication."""

    def __init__(self, blocks: list[EdgeBlock]) -> None:
        super().__init__(None, "edge_softmax")
        self.blocks = blocks

    def forward(self, *inputs: Any) -> ForwardOutput:
        out = edge_softmax_forward(self.blocks, inputs[0])
        return ForwardOutput((out,), [out])

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        return [edge_softmax_backward(self.blocks, saved[0], grads[0])]
