"""The public import path `sar.core.sampling`, which scripts written for SAR use; the room is `sar/sampling/`.

A facade, as `sar/core/__init__.py`, which alone imports it.
"""

from sar.sampling import DataLoader, DistNeighborSampler

__all__ = ["DataLoader", "DistNeighborSampler"]
