"""Layers for `sar plan` and the demo without DGL, with the parameters and results of DGL's layers."""

from typing import Any

import torch
from torch import Tensor, nn

from sar.core.modules import as_autocast
from sar.core.passing.attention import attention, recompute_linear
from sar.core.passing.messages import COPY_SOURCE, SCALED_SOURCE, aggregate, meanwhile, multiplies_first
from sar.kernels.ops import Score

SLOPE = 0.2  # of GAT's leaky ReLU
RELU = nn.init.calculate_gain("relu")


class SAGEConv(nn.Module):
    """GraphSAGE with mean aggregation (Hamilton et al., 2017)."""

    def __init__(self, width: int, next_width: int) -> None:
        super().__init__()
        self.fc_neigh = nn.Linear(width, next_width, bias=False)
        self.fc_self = nn.Linear(width, next_width)
        for layer in (self.fc_self, self.fc_neigh):
            nn.init.xavier_uniform_(layer.weight, RELU)

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # x: (N, D) -> (N, D')
        context = graph.call_context()
        first = multiplies_first(context, x, self.fc_neigh.in_features, self.fc_neigh.out_features)
        x = as_autocast(x)
        rows = self.fc_neigh(x) if first else x
        with meanwhile(lambda: self.fc_self(x)) as own:
            mean = aggregate(context, COPY_SOURCE, "mean", rows)
        return own().add_(mean) if first else own().addmm_(mean, as_autocast(self.fc_neigh.weight).T)


class GraphConv(nn.Module):
    """GCN: neighbours weighted by the degrees of both ends (Kipf and Welling, 2017)."""

    def __init__(self, width: int, next_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(width, next_width)))
        self.bias = nn.Parameter(torch.zeros(next_width))

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # x: (N, D) -> (N, D')
        context = graph.call_context()
        rows = as_autocast(x)
        sent, received = (context.relation.degrees(rows.dtype, out=out, power=-0.5) for out in (True, False))
        weight = self.weight  # read once: a parametrization may count reads
        first = multiplies_first(context, x, *weight.shape)
        rows = (rows @ weight if first else rows) * sent
        rows = aggregate(context, SCALED_SOURCE, "sum", rows, received)
        return rows + self.bias if first else torch.addmm(self.bias, rows, weight).to(x.dtype)


class GATConv(nn.Module):
    """Attention with several heads, side by side (Velickovic et al., 2018)."""

    def __init__(self, width: int, next_width: int, heads: int) -> None:
        super().__init__()
        self.shape = heads, next_width
        self.fc = nn.Linear(width, heads * next_width, bias=False)
        self.attn_l, self.attn_r = (nn.Parameter(torch.empty(1, heads, next_width)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * next_width))
        for weights in (self.fc.weight, self.attn_l, self.attn_r):
            nn.init.xavier_normal_(weights, RELU)

    def forward(self, graph: Any, x: Tensor) -> Tensor:  # x: (N, D) -> (N, H, D')
        x = as_autocast(x)
        h = self.fc(x).unflatten(1, self.shape)
        attended = attention(
            graph.call_context(),
            Score.ADDITIVE,
            h,
            h,
            attn=self.attn_l[0],
            attn_dst=self.attn_r[0],
            factor=SLOPE,
            recompute=recompute_linear(self.fc, x, self.shape),
        )
        return attended + self.bias.view(self.shape)
