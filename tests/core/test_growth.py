"""With W workers, no distributed call costs one of them more than O(W): counted in steps of the interpreter."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from dgl import function as fn

import sar
from sar.comm import session
from sar.comm.group import Group
from sar.comm.rows import BufferPool
from sar.comm.transport import Transport
from sar.common_tuples import NID, PartitionData
from sar.train.counted_graph import META, GraphCounts, GraphInfo, RelationCounts, counted_graph
from tests.graphs import EdgeList, partition_in_memory
from tests.virtual.virtual_pool import VirtualPool

SAR = str(Path(sar.__file__).parent)
EDGES = ("_N", "_E", "_N")


def steps_of(work: Callable[[], Any]) -> int:
    """Instructions of Python that this thread takes in sar's code."""
    steps = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(SAR):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return steps


def operations(graph: Any, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    model = torch.nn.Linear(3, 3, device=x.device)

    def forward() -> torch.Tensor:
        with graph.local_scope():
            graph.ndata["h"] = model(x)
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
            return graph.ndata["out"]

    def update_all() -> None:
        forward().sum().backward()

    def apply_edges() -> None:
        with graph.local_scope():
            graph.ndata["h"] = model(x)
            graph.apply_edges(fn.u_add_v("h", "h", "e"))
            graph.edata["e"].sum().backward()

    return {"update_all": update_all, "apply_edges": apply_edges, "no gradients": torch.no_grad()(forward)}


def measured(calls: dict[str, Callable[[], Any]]) -> dict[str, list[int]]:
    """Three calls after a first one, which may make what is kept."""
    return {name: (call(), [steps_of(call) for _ in range(3)])[1] for name, call in calls.items()}


def on_processes(workers: int) -> dict[str, list[int]]:
    """Of one worker, in a group that counts what it sends."""
    halo = [[3 * (p != r) for p in range(workers)] for r in range(workers)]
    relation = RelationCounts(EDGES, [[3] * workers] * workers, halo, {})
    info = GraphInfo(["_N"], [EDGES], {"_N": 5 * workers}, {"_N": 3}, 2)
    counts = GraphCounts(info, [{"_N": 5}] * workers, [5] * workers, [relation], {"_N": 8}, [8])
    group = Group(Transport(1, workers), pool=BufferPool(META))
    with session.standing_in(group):
        graph, _ = counted_graph(counts, 1, group)
        return measured(operations(graph, torch.empty(5, 3, device=META)))


def in_one_process(data: PartitionData) -> dict[str, list[int]]:
    """Of one of the workers that share a process, which take turns."""
    graph = sar.construct_full_graph(data)
    x = torch.ones(graph.num_nodes(), 3)
    sampler = sar.DistNeighborSampler([2], input_node_features={"x": x})
    loader = sar.DataLoader(graph, data.node_features[NID], sampler, batch_size=len(x))
    model = torch.nn.Linear(3, 3)

    def gather_grads() -> None:
        model.zero_grad()
        model(x).sum().backward()
        sar.gather_grads(model)

    return measured({**operations(graph, x), "gather_grads": gather_grads, "batch": lambda: list(loader)})


def of_virtual_workers(workers: int) -> dict[str, list[int]]:
    """In each call, the most of any worker; each reads a row of every other."""
    src, dst = (end.reshape(-1) for end in torch.meshgrid(torch.arange(workers), torch.arange(workers), indexing="ij"))
    parts = partition_in_memory(EdgeList(src, dst, workers), torch.arange(workers), workers).partitions
    counted = VirtualPool(1, workers, spill=False).run(in_one_process, per_rank=parts)
    return {name: [max(steps) for steps in zip(*(one[name] for one in counted), strict=True)] for name in counted[0]}


@pytest.mark.parametrize("counted", [on_processes, of_virtual_workers])
def test_steps_grow_with_the_number_of_workers_at_most(counted: Callable[[int], dict[str, list[int]]]) -> None:
    counts = [counted(workers) for workers in (4, 8, 16)]
    for name in counts[0]:
        few, more, many = (min(calls[name]) for calls in counts)  # a turn that comes late takes steps of its own
        # Twice the workers, twice the steps that come with each; of O(W^2) it would be four times.
        assert many - more <= 2.05 * (more - few) + 50, name
