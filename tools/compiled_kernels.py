"""Compile the kernels in Triton for GPUs that need not be there, and write their registers into compiled_kernels.md.

    python -m tools.compiled_kernels                  # all, into the file; about a minute
    python -m tools.compiled_kernels "weighted sum"   # those whose name begins so, to be looked at

What is compiled is what the functions of the backend launch on small operands, for each GPU and type of features.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import sar.kernels.triton as kernels
from benchmarks.report import write_section
from sar.kernels import EdgeBlock, EdgeMessage, EdgeOperand, Op, Target
from sar.kernels.attention_operands import (
    STATISTICS,
    Attention,
    AttentionOperands,
    Gradients,
    OnlineSoftmaxState,
    Score,
)
from sar.kernels.triton import aggregate, attention
from sar.partition.inspect.text_tables import as_markdown

PAGE = Path(__file__).with_suffix(".md")
SECTION = "compiled kernels"
CAPABILITIES = (80, 90)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NODES, EDGES, HEADS = 40, 160, 4


class Launch(NamedTuple):
    """A kernel and what it is given."""

    kernel: Any
    operands: tuple[Any, ...]
    constants: dict[str, Any]


class Resources(NamedTuple):
    """What a thread, or a program, of a compiled kernel takes."""

    warps: int
    registers: int
    shared: int  # bytes
    spilled: int  # bytes


def features(dtype: torch.dtype, *shape: int) -> Tensor:
    """An operand."""
    return torch.ones(shape, dtype=dtype)


def sums(dtype: torch.dtype, *shape: int) -> Tensor:
    """A result, for operands of this type."""
    return features(torch.promote_types(dtype, torch.float32), *shape)


def block() -> EdgeBlock:
    """Edges, with IDs in another order."""
    edges, nodes = torch.arange(EDGES, dtype=torch.int32), torch.arange(NODES + 1, dtype=torch.int32)
    return EdgeBlock(nodes[:-1], nodes * (EDGES // NODES), edges % NODES, NODES, NODES, edges.flip(0))


def aggregations(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name."""
    u, v, e = Target.U, Target.V, Target.E
    x, weight = features(dtype, NODES, 64), features(dtype, EDGES, HEADS, 1)
    heads, of_heads = features(dtype, NODES, HEADS, 32), sums(dtype, NODES, HEADS, 32)
    scores, of_edges = sums(dtype, EDGES, HEADS), sums(dtype, EDGES, HEADS, 1)
    total, arg = sums(dtype, NODES, 64), torch.zeros(NODES, 64, dtype=torch.int32)
    copied = EdgeMessage(Op.COPY, EdgeOperand.of(x, u))
    weighted = EdgeMessage(Op.MUL, EdgeOperand.of(heads, u), EdgeOperand.of(weight, e))
    grad = EdgeOperand.of(heads, v)
    yield "sum", lambda: kernels.aggregate_sum(block(), copied, total)
    yield "weighted sum", lambda: kernels.aggregate_sum(block(), weighted, of_heads)
    yield "its gradient, features", lambda: kernels.aggregate_grad(block(), weighted, "lhs", grad, of_heads, None)
    yield "its gradient, weights", lambda: kernels.aggregate_grad(block(), weighted, "rhs", grad, of_edges, None)
    yield "maximum", lambda: kernels.aggregate_cmp(block(), copied, total, arg, True)
    yield (
        "its gradient",
        lambda: kernels.aggregate_grad(block(), copied, "lhs", EdgeOperand.of(x, v), total, arg),
    )
    dot = EdgeMessage(Op.DOT, EdgeOperand.of(heads, u), EdgeOperand.of(heads, v))
    yield "dot products of edges", lambda: kernels.edge_apply(block(), dot, of_edges)
    softmax = EdgeMessage(Op.DIV, EdgeOperand.of(scores.to(dtype), e), EdgeOperand.of(total[:, :HEADS].to(dtype), v))
    yield "quotients of edges", lambda: kernels.edge_apply(block(), softmax, scores)
    yield "rows added", lambda: kernels.add_rows(torch.arange(NODES), x, total)


def attentions(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name; of four heads of 32, with dropout and edge weights, and one wide head without."""
    for score in Score:
        for heads, dim, dropout in ((HEADS, 32, 0.5), (1, 602, 0.0)):
            how = Attention(score, 0.2, dropout, 2**62)
            ends = attention_operands(how, features(dtype, NODES, heads, dim))
            name = f"attention, {score.name}, {heads} x {dim}" + ", dropout and weights" * (dropout > 0)
            yield name, lambda how=how, ends=ends: attention_passes(how, ends)  # type: ignore[misc]
    x, attn, one = features(dtype, NODES, HEADS, 32), features(dtype, HEADS, 32), sums(dtype, NODES, HEADS)
    grads = sums(dtype, NODES, HEADS, 32), sums(dtype, HEADS, 32)
    yield "scores of nodes", lambda: kernels.project(x, attn)  # type: ignore[misc]
    yield "their gradient", lambda: kernels.project_grad(x, attn, one, *grads)


def attention_operands(how: Attention, x: Tensor) -> AttentionOperands:
    """Operands of the type of x, (N, H, D), with edge weights where there is dropout."""
    y = features(x.dtype, *x.shape[:2]) if how.score is Score.ADDITIVE else x
    attn = None if how.score is Score.DOT else features(x.dtype, *x.shape[1:])
    x_score = sums(x.dtype, *x.shape[:2]) if how.score is Score.ADDITIVE else None
    return AttentionOperands(x, y, attn, features(x.dtype, EDGES) if how.dropout else None, x_score)


def attention_passes(how: Attention, ends: AttentionOperands) -> None:
    """Forward, and both passes of the backward."""
    grads = Gradients(*(None if each is None else sums(each.dtype, *each.shape) for each in ends))
    kernels.attend(block(), how, ends, OnlineSoftmaxState.start(NODES, grads.x))
    stats = sums(ends.x.dtype, NODES, STATISTICS, ends.x.shape[1])
    kernels.attend_grad(block(), how, ends, grads.x, stats, grads)


def launches(run: Callable[[], None]) -> list[Launch]:
    """What a function of the backend launches."""
    found: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], on: Tensor, *operands: Any, **constants: Any) -> None:
        found.append(Launch(kernel, operands, constants))

    before = aggregate.launch
    aggregate.launch = attention.launch = record
    try:
        run()
    finally:
        aggregate.launch = attention.launch = before
    return found


class AbsentGpu:
    """What Triton asks of the driver of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Launch, capability: int) -> Any:
    """The kernel, compiled for a GPU."""
    triton.runtime.driver.set_active(AbsentGpu(capability))
    return launch.kernel.warmup(*launch.operands, grid=(1,), enable_fp_fusion=True, **launch.constants)


def resources(launch: Launch, capability: int) -> Resources:
    """What it takes on a GPU, of which ptxas has noted all but the memory that programs ask for at launch."""
    made = compiled(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [noted] = [dict(re.findall(r"(\w+):(\d+)", line)) for line in said.splitlines() if "REG:" in line]
    spilled = int(noted["STACK"]) + int(noted["LOCAL"])
    return Resources(made.metadata.num_warps, int(noted["REG"]), made.metadata.shared, spilled)


def table(beginning: str = "") -> list[tuple[str, ...]]:
    """A row for each kernel whose name begins so, after the header."""
    registers = [f"registers, sm_{capability}" for capability in CAPABILITIES]
    rows = [("kernel", "warps", *registers, "shared memory, bytes", "spilled, bytes")]
    for make in (aggregations, attentions):
        for same in zip(*(make(dtype) for dtype in DTYPES), strict=True):
            if same[0][0].startswith(beginning):
                rows += [_row(same[0][0], kernel) for kernel in zip(*(launches(run) for _, run in same), strict=True)]
    return rows


def _row(name: str, by_type: tuple[Launch, ...]) -> tuple[str, ...]:
    """What a kernel takes for each type of features; but for registers, the most of all GPUs."""
    found = [[resources(launch, capability) for launch in by_type] for capability in CAPABILITIES]
    most = [Resources._make(map(max, zip(*gpus, strict=True))) for gpus in zip(*found, strict=True)]
    kernel = by_type[0].kernel.__name__.removeprefix("_").removesuffix("_kernel")
    return (
        f"{name}: `{kernel}`",
        _of_types(each.warps for each in most),
        *(_of_types(each.registers for each in gpu) for gpu in found),
        _of_types(each.shared for each in most),
        _of_types(each.spilled for each in most),
    )


def _of_types(numbers: Iterable[int]) -> str:
    """Those of all types, or one number that these have in common."""
    each = [str(number) for number in numbers]
    return each[0] if len(set(each)) == 1 else " / ".join(each)


if __name__ == "__main__":
    rows = table(*sys.argv[1:])
    if sys.argv[1:]:
        print(as_markdown(rows))
    else:
        types = " / ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        write_section(PAGE, SECTION, f"Triton {triton.__version__}; by type: {types}\n\n{as_markdown(rows)}")
