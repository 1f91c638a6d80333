"""Copies between devices, and their streams."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. Copies from pinned memory are asynchronous, so it must not change meanwhile."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


@cache
def side_stream(device: torch.device) -> Any:
    """The stream for copies; one for each device, because torch reuses freed memory only on the stream it came from."""
    return getattr(torch, device.type).Stream(device)
