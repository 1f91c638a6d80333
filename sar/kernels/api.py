"""The interface of the kernels, and the choice of a backend for given tensors, which is made nowhere else.

Functions check the operands, because compiled loops do not check bounds, and call their backend. Results, to which
kernels write, are contiguous. `sar.kernels.attention` has those of attention.

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
from sar.errors import GraphError
from sar.host.ranges import named, traced
from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import (
    Attention,
    AttentionOperands,
    EdgeMessage,
    EdgeOperand,
    Gradients,
    OnlineSoftmaxState,
    Shape,
    Target,
)
from sar.logging_setup import logger

COMPILED_DTYPES = ({torch.float64}, {torch.float32, torch.bfloat16, torch.float16})
"""Operands and results of one call may mix the dtypes of one of these sets."""


class Backend(Protocol):
    """Kernels on checked operands: blocks with edges, contiguous results.

    See the functions of these names below and in `sar.kernels.attention`. For ADDITIVE scores
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
    """The backend for these operands and results; None stands for a missing operand."""
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
    if torch.bfloat16 in dtypes:
        _warn_of_bfloat16()
    if any(dtypes <= together for together in COMPILED_DTYPES):
        # Imported at first use, because Numba takes long to load.
        import sar.kernels.cpu.kernels as cpu_kernels
        from sar.host.compiler import converts_float16

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


@cache
def _warn_of_bfloat16() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning(
            "This processor has no instructions for bfloat16, in which torch multiplies up to 30 times slower than in "
            "float32. To halve messages only, set Config.wire_dtype_features and wire_dtype_gradients instead."
        )


def load_kernels() -> None:
    """Load the compiler of the CPU kernels now (0.5 s and 100 MB, once per process) instead of in the first epoch."""
    rows, values = torch.zeros(1, dtype=torch.int32, device="cpu"), torch.zeros(1, 1, device="cpu")
    choose(values).add_rows(rows, values, torch.zeros(1, 1, device="cpu"))


# -- aggregation over the edges of a block

_ROWS = {Target.U: "sources", Target.V: "destinations", Target.E: "edges"}


def aggregate_sum(block: EdgeBlock, message: EdgeMessage, out: Tensor, *, fresh: bool = False) -> None:
    """Add to each destination row of `out` the messages of its edges in the block.

    Args:
        out: (num_dst, *message shape), float32 if operands have a half precision.
        fresh: `out` has no values yet, and counts as zeros. This saves a pass over its memory.
    """
    _check(block, message, out, Target.V)
    if block.num_edges:
        choose(out, *message.tensors).aggregate_sum(block, message, out, fresh)
    elif fresh:
        out.zero_()


def aggregate_cmp(block: EdgeBlock, message: EdgeMessage, out: Tensor, arg: Tensor, largest: bool) -> None:
    """Update the running maximum (minimum) of each destination with the messages of its edges in the block.

    If messages are equal, the greatest edge ID wins, in any order of blocks. NaN never wins.

    Args:
        out: (num_dst, *message shape), -inf (+inf) at first, float32 if operands have a half precision.
        arg: like `out`, int32 or int64, -1 at first: the edge ID of the extreme.
        largest: maximum rather than minimum.
    """
    _check(block, message, out, Target.V)
    _check_shape(arg, tuple(out.shape), "The tensor of edge IDs of extremes")
    if not arg.is_contiguous():
        raise _not_contiguous(arg)
    if block.num_edges:
        choose(out, *message.tensors).aggregate_cmp(block, message, out, arg, largest)


def edge_apply(block: EdgeBlock, message: EdgeMessage, out: Tensor) -> None:
    """Write the message of every edge of the block to its row of `out`, (edges, *message shape)."""
    _check(block, message, out, Target.E)
    if block.num_edges:
        choose(out, *message.tensors).edge_apply(block, message, out)


def aggregate_grad(
    block: EdgeBlock, message: EdgeMessage, wrt: str, grad: EdgeOperand, out: Tensor, *, arg: Tensor | None = None,
    fresh: bool = False,
) -> None:  # fmt: skip
    """Add to `out` the gradient of the messages' operand `wrt`, summed over the dimensions that it broadcasts.

    Args:
        message: as in the forward; values may be None if `operand_values_needed` says so.
        wrt: "lhs" or "rhs".
        grad: gradient of the messages, with rows of edges, or of their aggregation, with rows of destinations.
        out: (rows of the operand's target, *trailing shape of the operand), float32 if that has a half precision.
        arg: edge IDs of a maximum or minimum, like `grad`; only their elements contribute. None: all.
        fresh: as in `aggregate_sum`.
    """
    operand = message.operands[wrt == "rhs"]
    if grad.shape != message.shape or grad.target is Target.U or (arg is not None and grad.target is Target.E):
        raise GraphError(
            f"A gradient has rows of {_ROWS[grad.target]} and trailing shape {grad.shape}; expected {message.shape}, "
            "and rows of edges or destinations, of destinations for a maximum or minimum."
        )
    if arg is not None and grad.values is not None:
        _check_shape(arg, tuple(grad.values.shape), "The tensor of edge IDs of extremes")
    _check(block, message, out, operand.target, operand.shape, grad)
    if block.num_edges:
        choose(out, grad.values, *message.tensors).aggregate_grad(block, message, wrt, grad, out, arg, fresh)
    elif fresh:
        out.zero_()


def add_rows(rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Add (n, ...) values to `rows`, (n,) integer and all distinct, of `out`, in place."""
    _check_shape(values, (len(rows), *out.shape[1:]), "A tensor of rows to add")
    if not out.is_contiguous():
        raise _not_contiguous(out)
    if values.numel():
        choose(out, values).add_rows(rows, values, out)


def _check(
    block: EdgeBlock, message: EdgeMessage, out: Tensor, out_target: Target, out_shape: Shape | None = None,
    grad: EdgeOperand | None = None,
) -> None:  # fmt: skip
    """Raise if an operand has too few rows or another width, since compiled loops do not check bounds."""
    if not out.is_contiguous():
        raise _not_contiguous(out)
    result = out, out_target, message.shape if out_shape is None else out_shape
    for values, target, shape in (*message.operands, result) if grad is None else (*message.operands, result, grad):
        if values is None:
            continue
        rows = block.edge_bound if target is Target.E else block.num_src if target is Target.U else block.num_dst
        if values.size(0) < rows or values.shape[1:] != shape:
            raise GraphError(
                f"A tensor with rows of {_ROWS[target]} has shape {tuple(values.shape)}; expected {(rows, *shape)}, "
                "or more rows."
            )


def _check_shape(values: Tensor, shape: Shape, what: str) -> None:
    if tuple(values.shape) != shape:
        raise GraphError(f"{what} has shape {tuple(values.shape)}; expected {shape}.")


def _not_contiguous(result: Tensor) -> GraphError:
    return GraphError(f"A result has the strides {result.stride()}; expected a contiguous tensor, as a new one is.")
