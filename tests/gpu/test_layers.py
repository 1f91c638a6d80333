"""Every layer of DGL and PyTorch Geometric on GPUs: outputs and all gradients equal those of one machine's CPU."""

import pytest
import torch

from tests import pretend_gpu
from tests.gpu.places import PLACES, Place
from tests.matrix import corner
from tests.parity import pyg_layers
from tests.parity.blocks import some_seeds
from tests.parity.conv_layers import CONVS, NEEDS_THREE_SOURCES, TAKES_BLOCKS, among, conv_gradients, precision_of
from tests.parity.harness import MODES, build, check, deal, partition_to, random_data
from tests.parity.pyg_layers import layer_results, random_parts
from tests.parity.test_conv_layers import with_in_edges

NOT_PRETENDED = ("SAGEConv lstm", "SAGEConv lstm, edge_weight", "GatedGraphConv")
"""Layers with kernels for recurrent networks, which the pretend device lacks."""
GROUPS = 6
"""Trips to the workers."""
QUICK = [0, *map(corner, range(1, GROUPS))]
"""Every sixth layer in `make test`."""


def names_of(layers: dict[str, object], place: Place, group: int) -> list[str]:
    return [name for name in list(layers)[group::GROUPS] if not (place.is_pretended and among(NOT_PRETENDED, name))]


@pytest.mark.parametrize("group", QUICK)
@pytest.mark.parametrize("place", PLACES, indirect=True, ids=str)
def test_layers_of_dgl(place: Place, group: int) -> None:
    modes = (1,) if place.is_pretended else MODES
    kinds: dict[tuple[torch.dtype, bool], list[str]] = {}
    for name in names_of(CONVS, place, group):
        kinds.setdefault((precision_of(name), name in NEEDS_THREE_SOURCES), []).append(name)
    for (dtype, of_three), names in kinds.items():
        parts = with_in_edges(place.world_size, of_three=of_three)
        seeds = torch.cat(some_seeds(parts, "uneven"))
        whole = [(conv_gradients, (name,)) for name in names]
        blocks = [(conv_gradients, (name, seeds)) for name in names if among(TAKES_BLOCKS, name)]
        data = random_data(parts, dtype)
        check(place.pool, parts, data, whole + blocks, modes, timeout=250, device=place.device)


@pytest.mark.parametrize("group", QUICK)
@pytest.mark.parametrize("place", PLACES, indirect=True, ids=str)
def test_layers_of_pyg(place: Place, group: int) -> None:
    parts = random_parts(place.world_size)
    cases = [(layer_results, (name,)) for name in names_of(pyg_layers.LAYERS, place, group)]
    modes = (1,) if place.is_pretended else MODES
    check(place.pool, parts, random_data(parts, torch.float64), cases, modes, timeout=250, device=place.device)


def with_types_beyond(mine, device):
    partition, data = mine
    with pretend_gpu.in_place_of(device):
        x = data.nodes["x"].to(device)
        graph = build(partition_to(partition, device), 1)
        CONVS["RelGraphConv"].make().to(x)(graph, x, torch.full((graph.num_edges(),), 3, device=device))


@pytest.mark.parametrize("place", PLACES, indirect=True, ids=str)
def test_types_that_a_layer_has_not(place: Place) -> None:
    parts = random_parts(place.world_size)
    outcomes = place.pool.outcomes(with_types_beyond, place.device, per_rank=deal(parts, random_data(parts)))
    assert {outcome.message for outcome in outcomes} == {"Types reach to 3; the layer was made for 3."}
