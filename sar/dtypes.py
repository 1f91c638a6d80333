"""Half precisions: the dtype in which they are summed, and the one in which compiled code gets their bits."""

import torch

HALF_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Numba has no half precisions, and takes their bits instead; the two must differ to be told apart."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: half precisions in float32."""
    return torch.float32 if dtype in HALF_BITS else dtype
