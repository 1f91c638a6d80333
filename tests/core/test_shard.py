"""How a shard's sources are numbered."""

import pytest
import torch

from sar.core.shard import number_distinct


@pytest.mark.parametrize("count", [0, 1, 6, 400], ids=lambda count: f"{count} of 100")
def test_distinct_nodes_are_numbered_in_order(count):
    nodes = torch.randint(100, (count,), generator=torch.Generator().manual_seed(3))
    distinct, places = number_distinct(nodes, 100)
    assert distinct.dtype == places.dtype == torch.int32
    assert distinct.tolist() == sorted(set(nodes.tolist()))
    assert torch.equal(distinct[places.long()].long(), nodes)
