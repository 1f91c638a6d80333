"""The interface of the kernel backends, and the choice of one for given tensors, which is made nowhere else.

A backend is a module with the functions of `Backend`: `sar.kernels.cpu.kernels` (compiled with Numba),
`sar.kernels.torch` (plain torch, on any device and for any dtype) and `sar.kernels.meta` (tensors without values).
To add one, write such a module and name it in `_choose`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

import sar.kernels.meta as meta_kernels
import sar.kernels.torch as torch_kernels
from sar.host.ranges import named, traced
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import Attention, AttentionOperands, EdgeMessage, EdgeOperand, Gradients, OnlineSoftmaxState
from sar.logging_setup import logger

COMPILED_DTYPES = ({torch.float64}, {torch.float32, torch.bfloat16, torch.float16})
"""Operands and results of one call may mix the dtypes of one of these sets."""


class Backend(Protocol):
    """Kernels on checked operands: blocks with edges, contiguous results.

    See the functions of these names in `sar.kernels.aggregate` and `sar.kernels.attention`. For ADDITIVE scores
    `operands.x_score` is given to `attend`, and `attend_grad` adds the gradient of `x_score` instead of those of its
    operands. `head_sums` writes the sums of grad * out over each head to stats[:, GRAD_DOT].
    """

    def aggregate_sum(self, block: EdgeBlock, message: EdgeMessage, out: Tensor, fresh: bool = False) -> None: ...
    def aggregate_cmp(
        self, block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool
    ) -> None: ...
    def edge_apply(self, block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None: ...
    def aggregate_grad(
        self, block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, arg: Tensor | None,
        fresh: bool = False,
    ) -> None: ...  # fmt: skip
    def add_rows(self, rows: Tensor, values: Tensor, out: Tensor) -> None: ...

    def project(self, x: Tensor, attn: Tensor) -> Tensor: ...
    def project_grad(self, x: Tensor, attn: Tensor, grad: Tensor, x_grad: Tensor, attn_grad: Tensor) -> None: ...
    def attend(
        self, block: EdgeBlock, how: Attention, operands: AttentionOperands, state: OnlineSoftmaxState
    ) -> None: ...
    def head_sums(self, how: Attention, grad: Tensor, out: Tensor, stats: Tensor) -> None: ...
    def attend_grad(
        self, block: EdgeBlock, how: Attention, operands: AttentionOperands, grad: Tensor, stats: Tensor,
        grads: Gradients,
    ) -> None: ...  # fmt: skip


class _Named:
    """A backend that shows its kernels as ranges in a trace."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        def kernel(*operands: Any) -> Any:
            with named(f"kernel {name}"):
                return getattr(self._backend, name)(*operands)

        return kernel


def choose(*tensors: Tensor | None) -> Backend:
    """The backend for these operands and results; None stands for an operand that is not given."""
    devices, dtypes, empty = set(), set(), False
    for tensor in tensors:
        if tensor is not None:
            devices.add(tensor.device.type)
            dtypes.add(tensor.dtype)
            empty |= tensor.numel() == 0
    backend = torch_kernels if empty and "meta" not in devices else _choose(frozenset(devices), frozenset(dtypes))
    return cast(Backend, _Named(backend)) if traced() else backend


@cache
def _choose(devices: frozenset[str], dtypes: frozenset[torch.dtype]) -> Backend:
    if "meta" in devices:
        return meta_kernels
    if "cuda" in devices:
        _warn_of_cuda()
    if devices != {"cpu"}:
        return torch_kernels
    if any(dtypes <= together for together in COMPILED_DTYPES):
        # Imported at the first use, because Numba takes long to load.
        import sar.kernels.cpu.kernels as cpu_kernels
        from sar.kernels.compiler import converts_float16

        if torch.float16 not in dtypes or converts_float16():
            return cpu_kernels
    logger.warning(
        "Kernels on %s values take plain torch on this CPU, which is several times slower than the compiled ones for "
        "float32. Convert features to float32, or use a GPU.",
        " and ".join(sorted(str(dtype) for dtype in dtypes)),
    )
    return torch_kernels


@cache
def _warn_of_cuda() -> None:
    logger.warning(
        "This graph is on a GPU, and no line of sar has been run on one by us. Compare a model's outputs and gradients "
        "with sar.check_model."
    )


def load_kernels() -> None:
    """Load the compiler of the CPU kernels now (0.5 s and 100 MB, once a process) and not in somebody's first epoch."""
    rows, values = torch.zeros(1, dtype=torch.int32, device="cpu"), torch.zeros(1, 1, device="cpu")
    choose(values).add_rows(rows, values, torch.zeros(1, 1, device="cpu"))
