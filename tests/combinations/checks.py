"""Compares what workers made of a case with one machine."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.combinations.cases import CHANGED, PLAIN, Case
from tests.combinations.graphs import Share, shares
from tests.combinations.runs import Raised, run, run_on_worker
from tests.parity.harness import Results, merge
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import WorkerPool, shared_pool

LEAST = {"float64": 1e-200, "float32": 1e-36, "bfloat16": 1e-36}
"""Numbers below it are lost in a precision."""
LEAST_HIDDEN = 1e-3
"""The scale of derivatives that are 0 but for rounding, beside others of about 1."""


REPLAYED = "in the backward"
"""Python message functions run again in the backward, when `torch.func.functional_call` is over."""


PROCESSES = {
    "1 worker": 1,
    "2 workers": 2,
    "3 workers": 3,
    "2 in turns": 1,
    "3 in turns": 1,
    "2 x 2 in turns": 2,
}
"""Of how many processes the workers are."""
EACH = {"2 in turns": 2, "3 in turns": 3, "2 x 2 in turns": 2}
"""How many workers take turns in a process."""


def pool_of(workers: str) -> WorkerPool | VirtualPool:
    """Processes, or workers that share them in turns."""
    processes = PROCESSES[workers]
    return VirtualPool(processes, EACH[workers]) if workers in EACH else shared_pool(processes)


def problems(cases: Sequence[Case]) -> dict[Case, str]:
    """What is wrong with each case, if anything; the cases have the same workers."""
    pool = pool_of(cases[0].workers)
    given = [shares(case, pool.world_size) for case in cases]
    by_rank = pool.run(
        run_on_worker,
        list(cases),
        per_rank=[[mine[rank] for mine, _ in given] for rank in range(pool.world_size)],
        timeout=30 + 10 * len(cases),
    )
    found = {}
    for number, (case, (_, whole)) in enumerate(zip(cases, given, strict=True)):
        expected = _on_one_machine(case, whole)
        if isinstance(expected, Raised) and case.between in CHANGED and isinstance(by_rank[0][number], dict):
            expected = _on_one_machine(
                replace(case, between=PLAIN), whole
            )  # which the backward on workers need not look at
        wrong = problem(case, [results[number] for results in by_rank], expected)
        if wrong is not None:
            found[case] = wrong
    return found


def _on_one_machine(case: Case, whole: Share) -> Results | Raised:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(case, whole)
    if isinstance(found, Raised):
        return found
    return {name: rows[whole.edges] if name.startswith("edge ") else rows for name, rows in found.items()}


def problem(case: Case, by_rank: Sequence[Results | Raised], expected: Results | Raised) -> str | None:
    """What is wrong, if anything: workers raise, all of them, where one machine does or there is no derivative."""
    raised = [each for each in by_rank if isinstance(each, Raised)]
    if raised and len(raised) < len(by_rank):
        return f"some workers raise: {by_rank}"
    if raised:
        refused = case.forward == "weights made by a function" and REPLAYED in raised[0].message
        refused |= case.backward == "second derivative" or case.between in CHANGED
        if isinstance(expected, Raised) or refused:
            return None
        return f"raises {raised[0]}"
    if isinstance(expected, Raised):
        return f"one machine raises {expected}"
    try:
        found = merge([each for each in by_rank if not isinstance(each, Raised)])
    except AssertionError as error:
        return str(error)
    if found.keys() != expected.keys():
        return f"returns {sorted(found)}, expected {sorted(expected)}"
    # Sums of derivatives that cancel, as of a softmax by what all of a node's edges have, are 0 but for rounding.
    cancels: tuple[str, ...] = ("same", "edge w.grad") if case.rounds else ("same",)
    least = 0.05 * max([_largest(rows) for name, rows in expected.items() if name.startswith(cancels)], default=0.0)
    if case.rounds:
        least = 0.1 * max([_largest(rows) for name, rows in expected.items() if name.endswith("grad")], default=0.0)
    if case.size == "size 1e-30" and "GATv2Conv" in case.calls:
        # Its bias hides features so small, and all rows are equal, so a normalisation behind makes them 0.
        least = max(least, LEAST_HIDDEN)
    wrong = [
        f"{name} {why}"
        for name, rows in expected.items()
        if not (case.jumps and name.endswith("grad"))
        and (why := _difference(case, found[name], rows, least if name.startswith(cancels) else 0.0)) is not None
    ]
    return "; ".join(wrong) or None


def _largest(rows: Tensor) -> float:
    finite = rows[rows.isfinite()]
    return finite.abs().max().item() if len(finite) else 0.0


def _difference(case: Case, found: Tensor, expected: Tensor, least: float) -> str | None:
    if found.shape != expected.shape:
        return f"has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    finite = expected.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return "is infinite or NaN elsewhere"
    if not finite.any():
        return None
    error = (found - expected)[finite].abs().max().item()
    scale = max(_largest(expected), LEAST[case.dtype], least)
    return None if error <= case.tolerance * scale else f"off by {error:.3g} of {scale:.3g}"
