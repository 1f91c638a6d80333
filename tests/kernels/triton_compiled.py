"""The kernels in Triton, compiled for GPUs that are not there; `test_triton.py` runs this without the interpreter."""

import re
from collections.abc import Iterator
from itertools import chain, pairwise

import pytest
import torch
import triton

from sar.kernels.attention_operands import Attention, Score
from tests.matrix import corner
from tools import compiled_kernels
from tools.compiled_kernels import CAPABILITIES, DTYPES, PAGE, Launch, aggregations, attentions, compiled, launches

ONE_OF_EACH = {
    "weighted sum",
    "its gradient, weights",
    "maximum",
    "rows added",
    "attention, DYNAMIC, 4 x 32, dropout and weights",
    "scores of nodes",
    "their gradient",
}
"""What launches every kernel at least once."""
NEWEST = CAPABILITIES[-1]


def launched(dtype: torch.dtype, names: set[str]) -> Iterator[Launch]:
    for name, run in chain(aggregations(dtype), attentions(dtype)):
        if name in names:
            yield from launches(run)


@pytest.mark.parametrize("capability, dtype", [(80, torch.bfloat16), (90, torch.float32)])
def test_every_kernel_is_compiled(capability: int, dtype: torch.dtype) -> None:
    kernels = [launch.kernel.__name__ for launch in launched(dtype, ONE_OF_EACH)]
    assert len(set(kernels)) == len(kernels) == 9, kernels
    for launch in launched(dtype, ONE_OF_EACH):
        assert compiled_kernels.resources(launch, capability).spilled <= 8, launch.kernel.__name__


@pytest.mark.slow
def test_the_page_tells_what_kernels_take_and_loops_spill_nothing() -> None:
    if f"Triton {triton.__version__};" not in PAGE.read_text():
        pytest.skip("the page has what another version of Triton makes")
    page = [re.sub(" +", " ", line) for line in PAGE.read_text().splitlines()]
    header, *rows = compiled_kernels.table()
    assert header[-1] == "spilled, bytes"
    assert rows
    for row in rows:
        assert all(int(spilled) <= 8 for spilled in row[-1].split(" / ")), row  # one number, before and after loops
        assert f"| {' | '.join(row)} |" in page, "run `python -m tools.compiled_kernels`"


@pytest.mark.parametrize("dtype", [DTYPES[0], corner(DTYPES[1])])
def test_rows_are_read_as_vectors(dtype: torch.dtype) -> None:
    """16 bytes at a time, where rows are aligned."""
    for launch in launched(dtype, {"sum", "weighted sum", "its gradient, features", "its gradient, weights"}):
        assert "ld.global.v4.b32" in compiled(launch, NEWEST).asm["ptx"], launch


@pytest.mark.parametrize("score", [Score.DYNAMIC, corner(Score.DOT)])
def test_products_of_a_score_are_added_in_one_order(score: Score) -> None:
    """By the same threads in all three kernels, or the backward would have other weights than the forward."""
    passes = launched(torch.float32, {f"attention, {score.name}, 4 x 32, dropout and weights"})
    orders = [_order_of_scores(compiled(launch, NEWEST).asm["ttgir"]) for launch in passes]
    assert len(orders) == 3
    assert all(one == other for one, other in pairwise(orders)), orders


def test_a_new_slope_probability_or_seed_compiles_nothing() -> None:
    made = []
    for slope, dropout, seed in (0.2, 0.5, 2**62), (1.0, 0.25, 1), (0.01, 1.0, 2**64 - 1):
        how = Attention(Score.DYNAMIC, slope, dropout, seed)
        ends = compiled_kernels.attention_operands(how, torch.ones(40, 4, 32))
        passes = launches(lambda how=how, ends=ends: compiled_kernels.attention_passes(how, ends))
        made.append([compiled(launch, NEWEST) for launch in passes])
    assert all(one is other for one, other in zip(made[0], made[1], strict=True))
    assert all(one is other for one, other in zip(made[0], made[2], strict=True))


def _order_of_scores(code: str) -> tuple[str, str]:
    """The shape of the first tensor that is added up over features, and how it is dealt to threads."""
    reduced = re.search(r'"tt\.reduce"\([^)]*\) <\{axis = 2 : i32.*?\}\) : \(tensor<([^,]*), (#\w+)>', code, re.DOTALL)
    assert reduced is not None
    layout = re.search(rf"^{reduced[2]} = (.*)$", code, re.MULTILINE)
    assert layout is not None
    return reduced[1], layout[1]
