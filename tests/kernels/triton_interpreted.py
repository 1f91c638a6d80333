"""The kernels in Triton in place of those of Numba, run as Python on the CPU: a plugin of pytest for `test_triton.py`.

    TRITON_INTERPRET=1 python -m pytest -p tests.kernels.triton_interpreted -k numba-1 tests/kernels/test_attention.py

Programs take few edges at a time, and few of a row, so that small graphs have hubs, and loops several rounds.
"""

import torch

import sar.kernels.triton as triton_kernels
from sar.kernels import backend
from sar.kernels.triton import edges

edges.PIECE, edges.TILE = 9, 256

_others = backend._choose


def _choose(devices: frozenset[str], dtypes: frozenset[torch.dtype]) -> backend.Backend:
    """As for CUDA tensors."""
    return triton_kernels if devices == {"cpu"} and dtypes <= backend.TRITON_DTYPES else _others(devices, dtypes)


backend._choose = _choose
