"""The public import path `sar.core.sampling`, for scripts written for SAR. The code is in `sar/sampling/`.

A facade like `sar/core/__init__.py`, and only imported by it.
"""

from sar.sampling import DataLoader, DistNeighborSampler

__all__ = ["DataLoader", "DistNeighborSampler"]
