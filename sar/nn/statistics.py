"""Batch normalisation, and sums, means and maxima with gradients, over the rows of all workers."""

from typing import Any

import torch
from torch import Tensor, nn

from sar.comm import session
from sar.comm.collectives import all_max
from sar.comm.group import Group
from sar.core.collective import Collective, ForwardOutput, uncompiled
from sar.errors import GraphError
from sar.kernels import accumulation_dtype
from sar.tensors.views import to_device

ROWS_BIT = 3  # first bit of the number of a worker's rows in the flags of `_Normalise`


class DistributedBN1D(nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over the nodes of all workers.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with the mean and biased variance over the rows of all workers.
    Workers exchange (count, mean, sum of squared deviations) and combine them as in Chan, Golub and LeVeque (1983), to
    avoid cancellation. `running_var` uses the unbiased variance, as in torch. A worker may have no rows.

    Args:
        n_feats: F, number of features.
        eps: added to the variance. Default 1e-5.
        affine: learn `weight` and `bias`, (F,) each. Default True.
        distributed: normalise over all workers. Default None: True if `initialize_comms` has been called.
        momentum: weight of the new statistics in the running average; None for a cumulative average. Default 0.1.
        track_running_stats: keep running statistics for evaluation. Default True.
    """

    knows_its_rows = True  # as layers that `sar.convert_batchnorm` has converted

    def __init__(
        self,
        n_feats: int,
        eps: float = 1e-5,
        affine: bool = True,
        distributed: bool | None = None,
        *,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(n_feats, eps, momentum, affine, track_running_stats)
        self.n_feats = n_feats
        self.distributed = distributed

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the rows of this worker. A collective call in training mode.

        Args:
            x: (N_i, F) floating point.

        Returns:
            (N_i, F).

        Raises:
            GraphError: for another shape, or in training mode if all workers together have fewer than two rows.
        """
        if x.dim() != 2 or x.shape[1] != self.n_feats or not x.is_floating_point():
            raise GraphError(
                f"DistributedBN1D got {tuple(x.shape)} of {x.dtype}; expected (nodes, {self.n_feats}), floating point."
            )
        if not self.training and self.running_mean is not None:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        together = session.is_initialized() if self.distributed is None else self.distributed
        return normalise(self, x, session.current_group() if together else None)


@uncompiled
def normalise(module: nn.BatchNorm1d, x: Tensor, group: Group | None) -> Tensor:
    """Normalise (N_i, F) rows by the statistics of the group, or of this worker if it is None.

    Uses the parameters and buffers of `module`, and in training updates its running statistics.
    """
    y, mean, var, count = _Normalise(x, module.eps, group, module.training).apply(x, module.weight, module.bias)
    batches, running_mean, running_var = module.num_batches_tracked, module.running_mean, module.running_var
    tracks = module.training and module.track_running_stats  # which Lightning turns off to freeze a layer
    if tracks and batches is not None and running_mean is not None and running_var is not None:
        with torch.no_grad():
            batches += 1
            share = module.momentum if module.momentum is not None else 1 / float(batches)
            running_mean.lerp_(mean.to(running_mean.dtype), share)
            running_var.lerp_((var * count / (count - 1)).to(running_var.dtype), share)
    return y


class _OverAllWorkers(Collective):
    """A collective computation in which workers exchange one small tensor each."""

    def from_all(self, own: Tensor) -> Tensor:
        """Gather the workers' tensors, (W, ...); `own` is this worker's."""
        if self.group is None or not self.distributed:
            return own.unsqueeze(0)
        everywhere = self.group.all_gather(own.detach().to(self.group.device).contiguous(), self.signature)
        return to_device(torch.stack(everywhere), own.device)


class _Normalise(_OverAllWorkers):
    """Normalises by the statistics of all workers, and also returns these, as constants."""

    def __init__(self, x: Tensor, eps: float, group: Group | None, training: bool) -> None:
        mode, gradients = "training" if training else "evaluation", "on" if torch.is_grad_enabled() else "off"
        super().__init__(group, f"DistributedBN1D of {x.dtype}, width {x.shape[1]}, {mode}, gradients {gradients}")
        self.eps = eps
        self.rows = len(x)

    def flags(self) -> int:
        return super().flags() | self.rows << ROWS_BIT

    def forward(self, *inputs: Any) -> ForwardOutput:
        x, weight, bias = inputs
        self.needed &= 2**ROWS_BIT - 1
        if sum(flags >> ROWS_BIT for flags in self.all_flags) <= 1:
            raise GraphError(
                "DistributedBN1D needs more than one row on all workers together to take their statistics."
            )
        wide = x.to(accumulation_dtype(x.dtype))
        own_mean = wide.mean(0) if len(x) else wide.new_zeros(x.shape[1])
        own = torch.cat([wide.new_full((1,), len(x)), own_mean, (wide - own_mean).square().sum(0)])
        # As by Chan, Golub and LeVeque, and in the same order on all workers, so that they get the same bits.
        counts, means, deviations = self.from_all(own).split([1, x.shape[1], x.shape[1]], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        var = (deviations + counts * (means - mean).square()).sum(0) / count
        scale = (var + self.eps).rsqrt()
        normal = (wide - mean) * scale
        y = normal if weight is None or bias is None else normal * weight + bias
        statistics = mean, var, count
        return ForwardOutput((y.to(x.dtype), *statistics), [normal, scale, weight, count], constants=statistics)

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        normal, scale, weight, count = saved
        grad = grads[0].to(normal.dtype)
        own = torch.stack([grad.sum(0), (grad * normal).sum(0)])  # (2, F)
        mean_grad, mean_product = self.from_all(own).sum(0) / count
        x_grad = (grad - mean_grad - normal * mean_product) * scale
        own_bias_grad, own_weight_grad = own
        return [x_grad if weight is None else x_grad * weight, own_weight_grad, own_bias_grad]


@uncompiled
def global_sum(values: Tensor) -> Tensor:
    """Sum a tensor over all workers. A collective call.

    Differentiable: the gradient is summed over workers, so each worker's input receives the gradient of the sum of all
    workers' losses. Shapes and dtypes are the same on all workers.
    """
    return _GlobalSum(values).apply(values)[0]


def global_mean(x: Tensor) -> Tensor:
    """Mean over the rows of all workers, (N_i, ...) to (...). A collective call, differentiable like `global_sum`.

    Raises:
        GraphError: for integers, as in torch.
    """
    if not (x.is_floating_point() or x.is_complex()):
        raise GraphError(f"global_mean got {x.dtype}; expected floating point: x.double().")
    own = x.sum(0, dtype=accumulation_dtype(x.dtype))
    total = global_sum(torch.cat([own.reshape(-1), own.new_full((1,), len(x))]))
    return (total[:-1] / total[-1].detach()).view(x.shape[1:]).to(x.dtype)


def global_max(x: Tensor) -> Tensor:
    """Maximum over the rows of all workers, (N_i, ...) to (...). A collective call; equal maxima share the gradient.

    As in `torch.amax`, NaN is the greatest value, and makes the gradient NaN.
    """
    if x.is_complex():
        raise GraphError(f"global_max got {x.dtype}, which has no order; take x.abs() or x.real.")
    if not x.is_floating_point():
        least = False if x.dtype == torch.bool else torch.iinfo(x.dtype).min
        return all_max(x.amax(0) if len(x) else x.new_full(x.shape[1:], least))
    with torch.no_grad():
        greatest = all_max(x.amax(0) if len(x) else x.new_full(x.shape[1:], -torch.inf))
        equal = (x == greatest).to(x.dtype)
        ties = global_sum(equal.sum(0, dtype=accumulation_dtype(x.dtype)))
        ties = ties.maximum((~greatest.isnan()).to(ties.dtype))  # without any rows there are none
    return greatest + (global_sum((zeros_of(x) * equal).sum(0)) / ties).to(x.dtype)


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


zeros_of = _Zeros.apply
"""Zeros whose gradient is passed on to x. We do not use x - x, because it is NaN if x is infinite."""


class _GlobalSum(_OverAllWorkers):
    def __init__(self, values: Tensor) -> None:
        shape, gradients = tuple(values.shape), "on" if torch.is_grad_enabled() else "off"
        super().__init__(session.current_group(), f"global_sum of {values.dtype} {shape}, gradients {gradients}")

        session.current_group().has_summed = True

    def forward(self, *inputs: Any) -> ForwardOutput:
        return ForwardOutput((self.from_all(inputs[0]).sum(0),))

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        return [self.from_all(grads[0]).sum(0)]
