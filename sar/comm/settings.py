"""The settings of one distributed call, from `Config`, and the size of its tiles."""

from typing import NamedTuple

import torch

from sar.comm.rows import RowFormat
from sar.config import Config, GlobalConfig

UNLIMITED_ROWS = 2**62
ROWS_PER_TILE = 8  # tiles into which a worker's mean rows are cut at least, unless these get small
SMALL_TILE = 2**20
"""Size in bytes above which larger messages are hardly faster."""


class Settings(NamedTuple):
    """Snapshot of `Config` at the start of a call. Its backward runs under the same settings."""

    depth: int
    buffer_bytes: int
    max_elements: int
    keep: bool  # keep fetched rows for the backward (modes 2 and 3)
    one_shot: bool  # post the whole exchange at once (mode 3)
    wire_features: torch.dtype | None
    wire_gradients: torch.dtype | None

    @classmethod
    def current(cls, *, one_shot: bool = False) -> "Settings":
        return cls(
            Config.pipeline_depth,
            Config.comm_buffer_bytes,
            Config.max_collective_size,
            Config.disable_sr or one_shot,
            one_shot,
            Config.wire_dtype_features,
            Config.wire_dtype_gradients,
        )

    def __str__(self) -> str:
        """The mode, and the settings of `Config` that differ from their defaults."""
        values = {
            "disable_sr": self.keep,
            "pipeline_depth": self.depth,
            "comm_buffer_bytes": self.buffer_bytes,
            "max_collective_size": self.max_elements,
            "wire_dtype_features": self.wire_features,
            "wire_dtype_gradients": self.wire_gradients,
        }
        changed = (f"{name} {value}" for name, value in values.items() if value != getattr(GlobalConfig, name))
        return ", ".join([f"mode {3 if self.one_shot else 2 if self.keep else 1}", *changed])

    def tile_rows(self, row: RowFormat, mean_rows: int, *, both_ways: bool) -> int:
        """Rows in a tile: a power of two, so that layers of similar width share the tiles' edge blocks.

        Tiles above `SMALL_TILE` are a fraction of a worker's mean rows, so that buffers are a fraction of the memory of
        features. `both_ways` is True if one exchange fetches rows and returns gradients.
        """
        limits = [UNLIMITED_ROWS]
        if not self.one_shot and row.row_bytes:
            buffers = (4 if both_ways else 2) * (self.depth + 1)
            limits.append(self.buffer_bytes // buffers // row.row_bytes)
            limits.append(max(mean_rows // ROWS_PER_TILE, SMALL_TILE // row.row_bytes))
        if self.max_elements and row.row_elements:
            limits.append(self.max_elements // row.row_elements)
        return 1 << max(min(limits), 1).bit_length() - 1
