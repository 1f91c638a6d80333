"""How often rows are written for the readers of a process: once if the backward reads them again."""

import gc
from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch

import sar
from sar.outofcore.letters import LettersInFile
from tests.graphs import EdgeList, partition_in_memory
from tests.parity.harness import build
from tests.parity.scenarios import scattered
from tests.virtual.virtual_pool import VirtualPool

PLACES = 3


def attention(graph: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return dgl.nn.GATConv(4, 2, 2).double()(graph, x)


def product(graph: Any, x: torch.Tensor) -> torch.Tensor:
    with graph.local_scope():
        graph.ndata["x"] = x
        graph.edata["w"] = torch.ones(graph.num_edges(), 1, dtype=x.dtype).requires_grad_()
        graph.update_all(dgl.function.u_mul_e("x", "w", "m"), dgl.function.sum("m", "y"))
        return graph.ndata["y"]


def a_sum(graph: Any, x: torch.Tensor) -> torch.Tensor:
    with graph.local_scope():
        graph.ndata["x"] = x
        graph.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "y"))
        return graph.ndata["y"]


def by_python(graph: Any, x: torch.Tensor) -> torch.Tensor:
    with graph.local_scope():
        graph.ndata["x"] = x
        graph.update_all(lambda edges: {"m": edges.src["x"].tanh()}, dgl.function.sum("m", "y"))
        return graph.ndata["y"]


def counted(partition: Any, layer: Callable[..., torch.Tensor]) -> tuple[list[int], list[int], bool]:
    """Letters made by all workers, and left, after a forward, after two backwards of it, and after an evaluation."""
    made, left, make = [0], [0], LettersInFile.__init__

    def counted_one(self: Any, *args: Any) -> None:
        made[-1], left[-1] = made[-1] + 1, left[-1] + 1
        make(self, *args)

    def ended_one(self: Any) -> None:
        left[-1] -= 1

    def end_step() -> None:
        gc.collect()
        sar.all_sum(0)
        made.append(0)
        left.append(left[-1])
        sar.all_sum(0)

    if sar.rank() == 0:
        LettersInFile.__init__, LettersInFile.__del__ = counted_one, ended_one
    graph = build(partition, 1)
    x = torch.ones(graph.num_nodes(), 4, dtype=torch.float64, requires_grad=True)
    out = layer(graph, x)
    end_step()
    out.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    end_step()
    out.sum().backward()
    equal = torch.equal(first, x.grad)
    end_step()
    with torch.no_grad():
        layer(graph, x)
    end_step()
    if sar.rank() == 0:
        LettersInFile.__init__ = make
        del LettersInFile.__del__
    return made[:-1], left[:-1], equal


@pytest.mark.parametrize("layer, rereads", [(attention, True), (product, True), (by_python, True), (a_sum, False)])
def test_rows_are_written_once_for_forward_and_backward(layer: Callable[..., torch.Tensor], rereads: bool) -> None:
    ring = torch.arange(30)
    edges = EdgeList(torch.cat([ring, ring, ring]), torch.cat([ring, (ring + 1) % 30, (ring + 7) % 30]), 30)
    parts = partition_in_memory(edges, scattered(30, PLACES), PLACES)
    pool = VirtualPool(1, PLACES, fits=False)
    results = pool.run(counted, layer, per_rank=parts.partitions)
    assert all(equal for _, _, equal in results)
    made, left, _ = results[0]
    assert made == [PLACES, PLACES, PLACES * (1 + rereads), PLACES]
    assert left == [PLACES * rereads, 0, 0, 0]
