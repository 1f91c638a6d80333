"""What travels between workers in an epoch: the least that a model needs, and to the byte what the engine sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sar.comm.plan import HaloPlan, Tile
from sar.comm.rows import FieldFormat, RowFormat
from sar.comm.settings import Settings

AGREEMENT_BYTES = 16
"""Of the digest and the flags that one worker sends to one other before each distributed call."""


class Exchanged(NamedTuple):
    """What one layer exchanges of each halo row.

    columns: width of a row.
    constant: it needs no gradient, as the input features.
    values_read: the derivative reads the sources' values, so that dropping them costs another fetch.
    """

    columns: int
    constant: bool = False
    values_read: bool = False


def bytes_needed(
    halo_counts: Sequence[Sequence[int]],
    rank: int,
    layers: Sequence[Exchanged],
    *,
    kept: bool = False,
    cached: bool = False,
    item_bytes: int = 4,
) -> int:
    """Bytes that a worker has to send in one epoch.

    Each halo row travels to its readers once, its gradient home once, and the row again where the backward reads it.

    Args:
        halo_counts: [p][r] is the number of rows of worker p that worker r reads.
        rank: the worker.
        layers: of the model.
        kept: fetched rows are kept for the backward (modes 2 and 3).
        cached: what was made of constant rows is kept from earlier epochs.
        item_bytes: of one number on the wire.
    """
    read_by_others = sum(halo_counts[rank])
    read_of_others = sum(row[rank] for row in halo_counts)
    total = 0
    for layer in layers:
        fetches = (not (cached and layer.constant)) + (layer.values_read and not kept)
        rows = fetches * read_by_others + (not layer.constant) * read_of_others
        total += rows * layer.columns * item_bytes
    return total


class LayerTraffic(NamedTuple):
    """Bytes that a worker sends for one layer in an epoch: messages with their alignment.

    forward: its rows to their readers.
    again: the same in the backward, where that reads them.
    home: gradients of the rows of others.
    """

    forward: int
    again: int
    home: int


@dataclass(frozen=True)
class EpochTraffic:
    """Bytes that a worker sends in an epoch with one step of the optimiser.

    parameters: gradients of the parameters in `gather_grads`.
    agreements: what precedes each distributed call.
    """

    layers: list[LayerTraffic]
    parameters: int
    agreements: int

    @property
    def sent(self) -> int:
        """All together, as `sar.comm.statistics()` counts it."""
        return sum(map(sum, self.layers)) + self.parameters + self.agreements


def halo_plan(halo_counts: Sequence[Sequence[int]], rank: int, num_nodes: int) -> HaloPlan:
    """The exchange of a worker as the engine plans it, without the rows' numbers.

    Args:
        halo_counts: (W, W): [p][r] is the number of rows of worker p that worker r reads.
        rank: the worker.
        num_nodes: of all workers.
    """
    none = [torch.empty(0, dtype=torch.int32)] * len(halo_counts)
    return HaloPlan(rank, none, torch.tensor(halo_counts), num_nodes // len(halo_counts))


def tile_rows(plan: HaloPlan, layer: Exchanged, settings: Settings) -> int:
    """Rows of a tile in the exchange of a layer."""
    return settings.tile_rows(_row(layer), plan.mean_rows, both_ways=layer.values_read)


def epoch_traffic(
    plan: HaloPlan, layers: Sequence[Exchanged], parameter_sizes: Sequence[int], settings: Settings
) -> EpochTraffic:
    """What a worker sends in an epoch: forward, backward and `gather_grads`.

    Args:
        plan: of the worker, from `halo_plan`.
        layers: of the model.
        parameter_sizes: elements of each parameter, float32.
        settings: of the engine.
    """
    if plan.world_size == 1:
        return EpochTraffic([LayerTraffic(0, 0, 0)] * len(layers), 0, 0)
    calls = sum(1 if layer.constant else 2 for layer in layers) + 1  # forward, backward, and gather_grads
    return EpochTraffic(
        [_layer_traffic(plan, layer, settings) for layer in layers],
        4 * sum(parameter_sizes) + 4 * len(parameter_sizes),  # and whether there is a gradient, for each
        calls * AGREEMENT_BYTES * (plan.world_size - 1),
    )


def _layer_traffic(plan: HaloPlan, layer: Exchanged, settings: Settings) -> LayerTraffic:
    forward = sum(sent for _, sent in message_sizes(plan, layer, settings))
    grads = _row(layer).narrowed(settings.wire_gradients)
    steps = plan.schedule(tile_rows(plan, layer, settings))
    home = sum(grads.message_bytes(_length(step.receive)) for step in steps)
    return LayerTraffic(
        forward,
        forward if layer.values_read and not settings.keep else 0,
        0 if layer.constant else home,
    )


def message_sizes(plan: HaloPlan, layer: Exchanged, settings: Settings) -> list[tuple[int, int]]:
    """Bytes that each step of the exchange receives and sends on the way out; on the way home it is the other way."""
    rows = _row(layer).narrowed(settings.wire_features)
    steps = plan.schedule(tile_rows(plan, layer, settings))
    return [(rows.message_bytes(_length(step.receive)), rows.message_bytes(_length(step.send))) for step in steps]


def _row(layer: Exchanged) -> RowFormat:
    return RowFormat((FieldFormat(torch.float32, (layer.columns,)),))


def _length(tile: Tile | None) -> int:
    return 0 if tile is None else tile.end - tile.begin
