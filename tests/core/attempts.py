"""Runs a program that is expected to fail on every worker, and then shows that the next agreed step is right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sar
from tests.graphs import PartitionedGraph
from tests.parity.harness import Data, Mine, Results, assert_close, build, deal, merge, random_data, weighted_sum
from tests.parity.programs import pairwise, weighted
from tests.workers import WorkerPool


@dataclass
class Failure:
    """What one rank raised."""

    kind: str
    bases: tuple[str, ...]
    message: str


def fail_on_all_ranks(
    pool: WorkerPool,
    parts: PartitionedGraph,
    program: Callable[..., None],
    *args: Any,
    mode: int = 1,
    timeout: float = 20.0,
) -> list[Failure]:
    """Run `program(graph, data, *args)`, require that each rank raises and that an agreed step then works everywhere.

    Args:
        pool: workers.
        parts: graph to run on.
        program: a top-level function.
        args: more arguments for it.
        mode: one of the three modes.
        timeout: `Config.timeout` on the workers.

    Returns:
        What each rank raised.
    """
    data = random_data(parts, torch.float64)
    found = pool.run(_attempt, program, args, mode, timeout, per_rank=deal(parts, data))
    expected = _agreed_step(parts.reference(), data)
    actual = merge([results for _, results in found])
    for name, value in expected.items():
        assert_close(actual[name], value)
    return [require(failure) for failure, _ in found]


def require(failure: Failure | None) -> Failure:
    assert failure is not None, "a rank raised nothing"
    return failure


def catch(program: Callable[..., Any], *args: Any) -> Failure | None:
    """Run, and return what was raised."""
    try:
        program(*args)
    except Exception as error:
        return Failure(type(error).__name__, tuple(base.__name__ for base in type(error).__mro__), str(error))
    return None


def catch_and_recover(program: Callable[..., Any], *args: Any) -> Failure | None:
    """As `catch`, on all workers, which then go on together."""
    failure = catch(program, *args)
    limit, sar.Config.timeout = sar.Config.timeout, max(sar.Config.timeout, 30.0)  # some workers fail later than others
    sar.recover()
    sar.Config.timeout = limit
    return failure


def assert_disagreement(failures: Sequence[Failure], *words: str) -> None:
    """Every rank raised DisagreementError, whose text has all these words."""
    for rank, failure in enumerate(failures):
        assert failure.kind == "DisagreementError", (rank, failure)
        for word in words:
            assert word in failure.message, (rank, word, failure.message)


def _attempt(mine: Mine, program: Callable[..., None], args: tuple[Any, ...], mode: int, timeout: float) -> Any:
    partition, data = mine
    graph = build(partition, mode)
    sar.Config.timeout = timeout
    settings = {name: getattr(sar.Config, name) for name in sar.Config.__annotations__}
    failure = catch_and_recover(program, graph, data, *args)
    for name, value in settings.items():
        setattr(sar.Config, name, value)
    return failure, _agreed_step(graph, data)


def _agreed_step(graph: Any, data: Data) -> Results:
    x, w = data.leaf("x"), data.leaf("w")
    out = pairwise(graph, weighted(graph, x, w), w)
    weighted_sum(out, data.nodes["cotangent"]).backward()
    return {"node output": out.detach(), "node x.grad": x.grad, "edge w.grad": w.grad}
