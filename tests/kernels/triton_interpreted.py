"""The kernels in Triton in place of those of Numba, run as Python on the CPU: a plugin of pytest for `test_triton.py`.

    TRITON_INTERPRET=1 python -m pytest -p tests.kernels.triton_interpreted -k numba-1 tests/kernels/test_attention.py

Programs take few edges at a time, and few of a row, so that small graphs have hubs, and loops several rounds.
"""

import torch
from torch import Tensor

import sar.kernels.triton as triton_kernels
from sar.kernels import backend
from sar.kernels.triton import edges

edges.PIECE, edges.TILE = 9, 256

_others = backend._choose


def _choose(*tensors: Tensor | None) -> backend.Backend:
    """As for CUDA tensors."""
    given = [tensor for tensor in tensors if tensor is not None]
    fit = all(tensor.dtype in backend.TRITON_DTYPES and tensor.numel() for tensor in given)
    on_cpu = all(tensor.device == torch.device("cpu") for tensor in given)
    return triton_kernels if fit and on_cpu else _others(*tensors)


backend._choose = _choose
