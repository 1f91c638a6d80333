"""Virtual workers compute what worker processes do: the corners of the matrix that `make test` has.

The matrix itself is all tests of the engine, run with `pytest --virtual WxV`: `make test-virtual`.
"""

import pytest

from tests.parity import test_conv_layers as convs
from tests.virtual.virtual_pool import VirtualPool


@pytest.mark.parametrize("name", ["GATConv", "GraphConv both", "SAGEConv lstm", "SAGEConv mean"])
@pytest.mark.parametrize("world_size, each", [(1, 5), (2, 2)])
def test_convolutions(world_size, each, name):
    parts = convs.with_in_edges(world_size * each)
    data = convs.random_data(parts, convs.precision_of(name))
    convs.check(VirtualPool(world_size, each), parts, data, [(convs.conv_gradients, (name,))])
