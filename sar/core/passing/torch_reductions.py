"""Maxima, minima and products of messages, with the gradients of `torch.scatter_reduce`.

They differ from those of `gather.py`, which are DGL's: equal maxima share the gradient evenly, infinities and NaN stay,
and nodes without messages get 0, or 1 for a product.
"""

import torch
from torch import Tensor

from sar.core.passing.gather import Combined, Reduction
from sar.kernels import EdgeBlock, accumulation_dtype


class _ByRows(Reduction):
    """Takes a block's messages into the rows of their destinations; `Combined.argmax` is what the backward needs."""

    fill: float

    def start(self) -> Combined:
        shape, device = (self.relation.num_dst, *self.shape), self.relation.in_degrees.device
        total = torch.full(shape, self.fill, dtype=accumulation_dtype(self.dtype), device=device)
        return Combined(total, torch.zeros_like(total))

    def total_grad(self, grad: Tensor) -> Tensor:
        return grad.to(accumulation_dtype(self.dtype))


def places(block: EdgeBlock, like: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that have messages, (R,), and which of them each message goes to, in the shape of the messages."""
    place = torch.repeat_interleave(block.indptr.long().diff())
    return block.rows.long(), place.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


class Extreme(_ByRows):
    """Maxima or minima. Of `Combined.argmax`, the number of messages equal to the result, the backward makes shares."""

    def start(self) -> Combined:
        self.fill = -torch.inf if self.reducer == "amax" else torch.inf
        return super().start()

    def add(self, combined: Combined, message: Tensor, block: EdgeBlock) -> None:
        assert combined.argmax is not None
        rows, place = places(block, message)
        message = message.to(combined.total.dtype)
        before = combined.total[rows]
        best = before.scatter_reduce(0, place, message, self.reducer or "", include_self=True)
        count = torch.zeros_like(best).scatter_add_(0, place, (message == best.gather(0, place)).to(best.dtype))
        combined.argmax[rows] = torch.where(best == before, combined.argmax[rows] + count, count)
        combined.total[rows] = best

    def finish(self, combined: Combined) -> Tensor:
        assert combined.argmax is not None
        # NaN equals no message, and makes shares of the gradient NaN, as torch's.
        total = combined.total.masked_fill_((combined.argmax == 0) & ~combined.total.isnan(), 0)
        # torch counts the 0 that the result starts from, wherever it equals the result, but gives it no share.
        combined.argmax = torch.stack([total, combined.argmax + (total == 0)])
        return total.to(self.dtype)

    def message_grad(self, grad: Tensor, argmax: Tensor | None, block: EdgeBlock, message: Tensor) -> Tensor:
        assert argmax is not None
        rows, place = places(block, message)
        total, share = argmax[0, rows], grad[rows] / argmax[1, rows]
        return (share.gather(0, place) * (message == total.gather(0, place))).to(self.dtype)


class Product(_ByRows):
    """Products. `total` leaves out messages that are 0; `Combined.argmax` counts them."""

    fill = 1.0

    def add(self, combined: Combined, message: Tensor, block: EdgeBlock) -> None:
        assert combined.argmax is not None
        rows, place = places(block, message)
        message = message.to(combined.total.dtype)
        zero = message == 0
        combined.total[rows] = combined.total[rows].scatter_reduce(0, place, message.masked_fill(zero, 1), "prod")
        combined.argmax[rows] = combined.argmax[rows].scatter_add(0, place, zero.to(message.dtype))

    def finish(self, combined: Combined) -> Tensor:
        assert combined.argmax is not None
        total, zeros = combined.total, combined.argmax
        combined.argmax = torch.stack([total, zeros])
        return total.masked_fill(zeros > 0, 0).to(self.dtype)

    def message_grad(self, grad: Tensor, argmax: Tensor | None, block: EdgeBlock, message: Tensor) -> Tensor:
        assert argmax is not None
        rows, place = places(block, message)
        others, zeros = (grad[rows] * argmax[0, rows]).gather(0, place), argmax[1, rows].gather(0, place)
        zero = message == 0
        only_one = zero & (zeros == 1)
        return torch.where((zeros == 0) | only_one, others / message.masked_fill(zero, 1), 0.0).to(self.dtype)


TORCH_REDUCERS: dict[str, type[Reduction]] = {"amax": Extreme, "amin": Extreme, "prod": Product}
