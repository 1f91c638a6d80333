"""Runs one program on the distributed graph and on the whole graph in DGL, and compares everything it returns.

A program is a top-level function `program(graph, data, *args)`, written as for DGL, that returns tensors by name. The
part before the first space says how the parts of the workers make the whole:

    "node ..."  rows of nodes: concatenated
    "edge ..."  rows of edges: concatenated
    "sum ..."   summed over workers
    "same ..."  equal on all workers
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sar
from sar.common_tuples import PartitionData, ShardEdgesAndFeatures
from tests import pretend_gpu
from tests.graphs import PartitionedGraph
from tests.parity.scenarios import SCENARIOS
from tests.workers import WorkerPool

Results = dict[str, Tensor]
Program = Callable[..., Results]
MODES = (1, 2, 3)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


@dataclass(repr=False)
class Data:
    """Rows of one worker, or of the whole graph: features of nodes and of edges by name.

    partition: where the worker's rows belong; None for the whole graph.
    """

    nodes: dict[str, Tensor]
    edges: dict[str, Tensor]
    partition: PartitionData | None = None

    def leaf(self, name: str) -> Tensor:
        """A fresh copy that takes a gradient."""
        return {**self.nodes, **self.edges}[name].clone().requires_grad_()

    def to(self, device: str) -> "Data":
        nodes, edges = ({k: v.to(device) for k, v in columns.items()} for columns in (self.nodes, self.edges))
        return Data(nodes, edges, self.partition and partition_to(self.partition, device))


def partition_to(partition: PartitionData, device: str) -> PartitionData:
    shards = [
        ShardEdgesAndFeatures(
            (shard.edges[0].to(device), shard.edges[1].to(device)),
            {name: column.to(device) for name, column in shard.edge_features.items()},
        )
        for shard in partition.all_shard_edges
    ]
    features = {name: column.to(device) for name, column in partition.node_features.items()}
    return partition._replace(all_shard_edges=shards, node_features=features)


def random_data(parts: PartitionedGraph, dtype: torch.dtype = torch.float32, seed: int = 0) -> Data:
    """Node features x (N, 6), y (N, 6) and cotangent (N, 8); edge weights w (E, 1) and edge features e (E, 6)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    count, edges = parts.num_nodes, len(parts.src)
    nodes = {"x": draw(count, 6), "y": draw(count, 6), "cotangent": draw(count, 8)}
    return Data(nodes, {"w": draw(edges, 1).abs() + 0.5, "e": draw(edges, 6), "edge cotangent": draw(edges, 8)})


def weighted_sum(rows: Tensor, cotangent: Tensor) -> Tensor:
    """A scalar in which each element of `rows` (N, ...) has its own weight."""
    flat = rows.reshape(len(rows), -1) if rows.numel() else rows.reshape(len(rows), 0)
    return (flat * cotangent[:, : flat.shape[1]]).sum()


def gradients(out: Tensor, data: Data, module: nn.Module | None = None, **leaves: Tensor) -> Results:
    """The output of all nodes, (N, ...), and gradients of leaves of the nodes, and of a module's parameters.

    Their loss is a weighted sum of the output; an output that is not floating point has none.
    """
    if not out.is_floating_point():
        return {"node out": out.double()}
    weighted_sum(out, data.nodes["cotangent"].repeat(1, 6)).backward()
    results = {"node out": out} | {f"node {name}.grad": leaf.grad for name, leaf in leaves.items()}
    return results if module is None else results | parameter_gradients(module)


def typed_gradients(
    outputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], x: Mapping[str, Tensor], module: nn.Module
) -> Results:
    """As `gradients` of several node types: "node TYPE", "node TYPE.grad" and those of parameters."""
    sum(weighted_sum(rows, cotangents[ntype]) for ntype, rows in outputs.items()).backward()  # type: ignore[union-attr]
    results = {f"node {ntype}": rows.detach() for ntype, rows in outputs.items()}
    results |= {f"node {ntype}.grad": leaf.grad for ntype, leaf in x.items() if leaf.grad is not None}
    return results | parameter_gradients(module)


def assert_typed_close(by_rank: Sequence[Results], expected: Results, node_ids: Mapping[str, Tensor]) -> None:
    """Compare `typed_gradients` of workers, whose nodes have these IDs in the whole graph; more gradients are 0."""
    for key in expected.keys() | {key for key in by_rank[0] if key.endswith(".grad")}:
        found = [results[key] for results in by_rank]
        if key not in expected:
            assert not any(rows.any() for rows in found), key
        elif key.startswith("same "):
            assert_close(found[0], expected[key])
        else:
            assert_close(torch.cat(found), expected[key][node_ids[key.split(" ")[1].removesuffix(".grad")]])


def parameter_gradients(module: nn.Module) -> Results:
    """Gradients summed over workers by `sar.gather_grads`, or as they are on one machine."""
    if dist.is_initialized():
        sar.gather_grads(module)
    return {f"same {name}": value.grad for name, value in module.named_parameters() if value.grad is not None}


def extremum(graph: Any, function: Any, reducer: str) -> Tensor:
    """Maximum or minimum of messages on one machine, by torch: of equal messages the last takes the gradient.

    DGL itself sends it to the last edge in float32 without broadcasting, to the first one otherwise, and to node 0
    where there is no edge at all.
    """
    graph.apply_edges(function)
    messages = graph.edata.pop("m")
    if len(messages) == 0:
        return messages.new_zeros(graph.num_dst_nodes(), *messages.shape[1:]) + 0 * messages.sum()
    dst = graph.edges(order="eid")[1]
    index = dst.reshape(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    best = messages.detach().new_zeros(graph.num_dst_nodes(), *messages.shape[1:])
    best = best.scatter_reduce(0, index, messages.detach(), f"a{reducer}", include_self=False)
    number = torch.arange(len(dst)).reshape(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    number = number.masked_fill(messages.detach() != best[dst], -1)
    last = torch.full(best.shape, -1).scatter_reduce(0, index, number, "amax")
    return messages.gather(0, last.clamp(min=0)).masked_fill(last < 0, 0)


def build(partition: PartitionData, mode: int) -> Any:
    """The graph in one of the three modes; sets `Config.disable_sr`."""
    sar.Config.disable_sr = mode == 2
    graph = sar.construct_full_graph(partition)
    return graph.get_full_partition_graph() if mode == 3 else graph


Mine = tuple[PartitionData, Data]
Case = tuple[Program, tuple[Any, ...]]


def deal(parts: PartitionedGraph, data: Data) -> list[Mine]:
    """What each worker is given."""
    nodes = {name: parts.split_nodes(rows) for name, rows in data.nodes.items()}
    edges = {name: parts.split_edges(rows) for name, rows in data.edges.items()}
    return [
        (partition, Data({k: v[rank] for k, v in nodes.items()}, {k: v[rank] for k, v in edges.items()}))
        for rank, partition in enumerate(parts.partitions)
    ]


def random_shares(world_size: int, dtype: torch.dtype = torch.float32) -> list[Mine]:
    """What each worker is given of the random graph, with random data."""
    parts = SCENARIOS["random"](world_size)
    return deal(parts, random_data(parts, dtype))


def run_on_worker(
    mine: Mine, cases: Sequence[Case], modes: Sequence[int], settings: Mapping[str, Any], device: str
) -> Any:
    partition, data = mine
    data.partition = partition
    for name, value in settings.items():
        setattr(sar.Config, name, value)
    results: dict[int, list[Results]] = {}
    with pretend_gpu.in_place_of(device):
        data = data.to(device)
        for mode in modes:
            graph = build(data.partition, mode)
            results[mode] = [run_program(program, graph, data, *args) for program, args in cases]
    return results


def run_program(program: Program, graph: Any, data: Data, *args: Any) -> Results:
    torch.manual_seed(7)
    results = program(graph, data, *args)
    assert {value.device.type for value in results.values()} <= {graph.device.type}
    return {name: value.detach().cpu() for name, value in results.items()}


def merge(by_rank: Sequence[Results]) -> Results:
    """Make the whole of the workers' parts."""
    assert len({frozenset(results) for results in by_rank}) == 1, [sorted(results) for results in by_rank]
    whole = {}
    for name in by_rank[0]:
        values = [results[name] for results in by_rank]
        kind = name.split(" ", 1)[0]
        if kind in ("node", "edge"):
            whole[name] = torch.cat(values)
        elif kind == "sum":
            whole[name] = torch.stack(values).sum(0)
        else:
            assert kind == "same", name
            assert all(torch.equal(value, values[0]) for value in values), f"{name} differs between workers"
            whole[name] = values[0]
    return whole


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None, least_scale: float = 0.1) -> None:
    """Equal shape, dtype, NaN and inf; values that differ by `tolerance` times the scale of `expected` at most."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{actual.dtype}, expected {expected.dtype}"
    finite = expected.isfinite()
    assert torch.equal(actual[~finite].nan_to_num(5.0), expected[~finite].nan_to_num(5.0)), "NaN or inf differ"
    if not finite.any():
        return
    difference = (actual[finite] - expected[finite]).abs().max().item()
    scale = max(expected[finite].abs().max().item(), least_scale)
    limit = (TOLERANCE[expected.dtype] if tolerance is None else tolerance) * scale
    assert difference <= limit, f"differs by {difference:.3g}, scale {scale:.3g}, allowed {limit:.3g}"


def run_everywhere(
    pool: WorkerPool,
    parts: PartitionedGraph,
    data: Data,
    cases: Sequence[Case],
    modes: Sequence[int] = MODES,
    settings: Mapping[str, Any] | None = None,
    timeout: float = 60,
    device: str = "cpu",
) -> dict[int, list[Results]]:
    """Run all cases in all modes in one trip to the workers; return, by mode, the merged results of every case."""
    given = deal(parts, data)
    by_rank = pool.run(run_on_worker, cases, modes, settings or {}, device, per_rank=given, timeout=timeout)
    return {
        mode: [merge([results[mode][number] for results in by_rank]) for number in range(len(cases))] for mode in modes
    }


def run_on_one_machine(parts: PartitionedGraph, data: Data, cases: Sequence[Case]) -> list[Results]:
    """The results of DGL on the whole graph, whose edges have their original order, as the rows of workers would be."""
    order = parts.edge_ids.argsort()
    graph = parts.original()
    given = Data(data.nodes, {name: rows[order] for name, rows in data.edges.items()})
    results = [run_program(program, graph, given, *args) for program, args in cases]
    return [
        {name: value[parts.edge_ids] if name.startswith("edge ") else value for name, value in of_case.items()}
        for of_case in results
    ]


def check(
    pool: WorkerPool,
    parts: PartitionedGraph,
    data: Data,
    cases: Sequence[Case],
    modes: Sequence[int] = MODES,
    settings: Mapping[str, Any] | None = None,
    timeout: float = 60,
    reference_data: Data | None = None,
    tolerance: float | None = None,
    least_scale: float = 0.1,
    visible_order: bool = False,
    device: str = "cpu",
) -> None:
    """Compare all cases in all modes with single-machine DGL on the CPU, and report all differences together.

    With `reference_data`, of another precision, the results are compared in that precision. Sums of numbers around 1
    may cancel, so errors are measured against `least_scale` where a result is smaller. `visible_order` is for equal
    extremes, of which the last edge in the visible order gets the gradient, and for values of some edges only.
    """
    whole = reference_data or data
    if visible_order:
        expected = [run_program(program, parts.reference(), whole, *args) for program, args in cases]
    else:
        expected = run_on_one_machine(parts, whole, cases)
    results = run_everywhere(pool, parts, data, cases, modes, settings, timeout, device)
    problems = []
    for mode in modes:
        for number, (program, args) in enumerate(cases):
            assert results[mode][number].keys() == expected[number].keys()
            for name, value in expected[number].items():
                actual = results[mode][number][name]
                try:
                    if reference_data is not None:
                        assert actual.dtype == data.nodes["cotangent"].dtype
                        actual = actual.to(value.dtype)
                    assert_close(actual, value, tolerance, least_scale)
                except AssertionError as error:
                    problems.append(f"mode {mode}, {program.__name__}{args}, {name}: {error}")
    assert not problems, f"{len(problems)} results differ:\n" + "\n".join(problems[:20])
