"""A device "gpu" that every machine has: tensors that say they are on it, computed on the CPU.

Where such a tensor meets one on the CPU, as two devices never may, the operation raises. Unlike torch's
`FakeTensorMode` this has values, so that code which reads sizes from values runs, and a backward, on builds of torch
without CUDA. It cannot be undone, so it needs a process of its own.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "gpu"
CPU = torch.device("cpu")
aten = torch.ops.aten
CROSSING = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
}
"""Operations that take tensors of both devices. Indices may be on the CPU, and numbers, tensors of no dimension."""


class PretendTensor(Tensor):
    """A tensor on the device."""

    values_on_cpu: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> "PretendTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=f"{NAME}:0",
        )
        made.values_on_cpu = real
        return made

    def __repr__(self, *args: Any) -> str:
        return f"{self.values_on_cpu!r} on {NAME}"

    def tolist(self) -> Any:
        return self.values_on_cpu.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendGpu(TorchDispatchMode):
    """The context in which tensors are made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def available() -> bool:
    """Whether this torch can have such a device."""
    return hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")


def install() -> None:
    """Give this process the device; once, before its first backward."""
    if not hasattr(torch, NAME):
        registration = torch.utils.backend_registration
        module = type("Module", (registration._DummyBackendModule,), {"get_amp_supported_dtype": lambda self: []})
        registration._setup_privateuseone_for_python_backend(NAME, module())
        torch.tensor = partial(_tensor, torch.tensor)  # which looks at no mode


def in_place_of(device: str) -> AbstractContextManager[Any]:
    """The context for work on `device`, which may be this one."""
    if not device.startswith(NAME):
        return nullcontext()
    install()
    return PretendGpu()


def _tensor(original: Callable[..., Tensor], data: Any, *, device: Any = None, **options: Any) -> Tensor:
    made = original(data, **options)
    return made if device is None else made.to(device)


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    here = [value for value in given if isinstance(value, PretendTensor)]
    elsewhere = [value for value in given if not isinstance(value, PretendTensor) and value.dim()]
    if here and elsewhere and func not in CROSSING:
        message = f"{func} of tensors on {NAME} and on the CPU"
        print(message, file=sys.stderr)  # an error in a backward ends the process
        raise RuntimeError(message)
    device = kwargs.get("device")
    if func is aten.copy_.default:
        on_device = isinstance(args[0], PretendTensor)
    else:
        on_device = bool(here) if device is None else torch.device(device).type == NAME
    if device is not None:
        kwargs = {**kwargs, "device": CPU}
    made = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    known = {id(value.values_on_cpu): value for value in here}  # what is changed in place stays what it is
    return tree_map(lambda value: _on_device(value, known) if on_device else value, made)


def _real(value: Any) -> Any:
    return value.values_on_cpu if isinstance(value, PretendTensor) else value


def _on_device(value: Any, known: dict[int, PretendTensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else PretendTensor(value)
