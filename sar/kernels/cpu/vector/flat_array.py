"""Arrays in compiled loops as no more than a pointer and a size.

Numba passes an array to a function as seven values, and kernels pass a dozen arrays through many helpers: half of all
code that LLVM was given took these apart and put them together again.
"""

from __future__ import annotations

import operator
from typing import Any

from numba.core import types
from numba.core.imputils import lower_getattr
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import lower_builtin, models, register_model, type_callable

from sar.kernels.cpu.vector.intrinsics import typed_intrinsic

_Tuple: Any = types.BaseTuple
_registered: Any = register_model
_typed: Any = type_callable
_lowered: Any = lower_builtin
_attributes: Any = infer_getattr
_attribute: Any = lower_getattr
_Attributes: Any = AttributeTemplate


class Flat(types.Type):
    """The elements of a flat array of one dtype."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(f"flat({dtype})")
        self.dtype = dtype


@_registered(Flat)
class _FlatModel(models.StructModel):
    def __init__(self, manager: Any, kind: Flat) -> None:
        super().__init__(manager, kind, [("data", types.CPointer(kind.dtype)), ("size", types.uint64)])


def _thin_type(kind: Any) -> Any:
    if isinstance(kind, _Tuple):
        return _Tuple.from_types([_thin_type(item) for item in kind], getattr(kind, "instance_class", None))
    return Flat(kind.dtype) if isinstance(kind, types.Array) else kind


def _thin(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    thin_type = _thin_type(kind)
    if isinstance(kind, _Tuple):
        items = [_thin(context, builder, item, builder.extract_value(value, i)) for i, item in enumerate(kind)]
        return context.make_tuple(builder, thin_type, items)
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        made = context.make_helper(builder, thin_type)
        made.data, made.size = array.data, array.nitems
        return made._getvalue()
    return value


@typed_intrinsic  # type: ignore[untyped-decorator]
def thin(_context: Any, value: Any) -> Any:
    """A flat array, or a tuple of any depth with all its flat arrays, as `Flat`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _thin(context, builder, signature.args[0], arguments[0])

    return _thin_type(value)(value), generate


@typed_intrinsic  # type: ignore[untyped-decorator]
def nothing_of(_context: Any, array: Any) -> Any:
    """array[:0]"""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_helper(builder, signature.return_type, value=arguments[0])
        made.size = made.size.type(0)
        return made._getvalue()

    return array(array), generate


@_typed(operator.getitem)  # type: ignore[untyped-decorator]
def _type_of_item(_context: Any) -> Any:
    return lambda array, index: array.dtype if isinstance(array, Flat) and isinstance(index, types.Integer) else None


@_typed(operator.setitem)  # type: ignore[untyped-decorator]
def _type_of_set(_context: Any) -> Any:
    return lambda array, index, value: (
        types.none if isinstance(array, Flat) and isinstance(index, types.Integer) else None
    )


def _address(builder: Any, arguments: Any) -> Any:
    return builder.gep(builder.extract_value(arguments[0], 0), [arguments[1]])


@_lowered(operator.getitem, Flat, types.Integer)  # type: ignore[untyped-decorator]
def _get(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return context.unpack_value(builder, signature.return_type, _address(builder, arguments))


@_lowered(operator.setitem, Flat, types.Integer, types.Any)  # type: ignore[untyped-decorator]
def _set(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    dtype = signature.args[0].dtype
    value = context.cast(builder, arguments[2], signature.args[2], dtype)
    context.pack_value(builder, dtype, value, _address(builder, arguments))
    return context.get_dummy_value()


@_attributes
class _FlatAttributes(_Attributes):  # type: ignore[misc]
    key = Flat

    def resolve_size(self, _kind: Flat) -> Any:
        return types.uint64

    def resolve_dtype(self, kind: Flat) -> Any:
        return types.DType(kind.dtype)

    def resolve_itemsize(self, _kind: Flat) -> Any:
        return types.intp


@_attribute(Flat, "size")  # type: ignore[untyped-decorator]
def _size(_context: Any, builder: Any, _kind: Any, value: Any) -> Any:
    return builder.extract_value(value, 1)


@_attribute(Flat, "dtype")  # type: ignore[untyped-decorator]
def _dtype(context: Any, _builder: Any, _kind: Any, _value: Any) -> Any:
    return context.get_dummy_value()


@_attribute(Flat, "itemsize")  # type: ignore[untyped-decorator]
def _itemsize(context: Any, _builder: Any, kind: Any, _value: Any) -> Any:
    return context.get_constant(types.intp, kind.dtype.bitwidth // 8)
