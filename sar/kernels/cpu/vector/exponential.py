"""The exponential of a vector."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from sar.kernels.cpu.compile import FAST_MATH
from sar.kernels.cpu.vector.intrinsics import declare, typed_intrinsic

IN_ORDER = ("contract",)  # Numba gives instructions without flags all those of FAST_MATH, which may reorder them
ROUND = 1.5 * 2.0**23  # a float32 of this size has no fraction


@typed_intrinsic  # type: ignore[untyped-decorator]
def exp(_context: Any, x: Any) -> Any:
    """e to the x, of a vector; of float32 to 3 units in the last place, 0 below -87, and that of 88 above it."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        kind = value.type

        def constant(number: float, kind: Any = kind) -> Any:
            return ir.Constant(kind, [number] * x.count)

        def call(name: str, *arguments: Any) -> Any:
            name = f"llvm.{name}.v{x.count}f{x.dtype.bitwidth}"
            return builder.call(
                declare(builder.module, ir.FunctionType(kind, [kind] * len(arguments)), name), arguments
            )

        if x.dtype != types.float32:
            return call("exp", value)
        # Adding and taking away ROUND leaves the nearest integer, which also stands in the last bits of the sum. The
        # instructions that convert numbers check their range, one element after the other.
        bounded = builder.select(builder.fcmp_ordered(">", value, constant(88.0)), constant(88.0), value)
        scaled = builder.fmul(bounded, constant(1.4426950408889634), flags=IN_ORDER)
        sum_ = builder.fadd(scaled, constant(ROUND), flags=IN_ORDER)
        power = builder.fsub(sum_, constant(ROUND), flags=IN_ORDER)
        # Two steps take ln 2 away in more digits than one number has.
        rest = builder.fsub(bounded, builder.fmul(power, constant(0.693359375), flags=IN_ORDER), flags=IN_ORDER)
        low = builder.fmul(power, constant(-2.12194440054690583e-4), flags=IN_ORDER)
        rest = builder.fsub(rest, low, flags=IN_ORDER)
        result = constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            result = builder.fmul(result, rest, flags=FAST_MATH)
            result = builder.fadd(result, constant(1 / divisor), flags=FAST_MATH)
        integers = ir.VectorType(ir.IntType(32), x.count)
        exponent = builder.add(builder.bitcast(sum_, integers), constant(127, integers))
        exponent = builder.shl(exponent, constant(23, integers))
        result = builder.fmul(result, builder.bitcast(exponent, kind))
        return builder.select(builder.fcmp_ordered("<", value, constant(-87.0)), constant(0.0), result)

    return x(x), generate
