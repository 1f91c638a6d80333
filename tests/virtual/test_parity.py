"""What holds for worker processes holds for virtual workers: the tests of the engine, with these in place of those."""

import pytest

from tests.parity import test_conv_layers as convs
from tests.virtual.virtual_pool import VirtualPool

SHAPES = [(1, 2), (1, 5), (2, 2), (2, 4)]


def ignore(*args):
    """In place of `record_property`."""


@pytest.fixture
def virtual(world_size, each):
    return VirtualPool(world_size, each)


@pytest.mark.parametrize("name", convs.CONVS)
@pytest.mark.parametrize("world_size, each", SHAPES)
def test_convolution(virtual, name):
    convs.test_convolution(virtual, virtual.world_size, name, ignore)
