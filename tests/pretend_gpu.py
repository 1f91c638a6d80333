"""A device "gpu" that every machine has: tensors that say they are on it, computed on the CPU.

Where such a tensor meets one on the CPU, as two devices never may, the operation raises. Unlike torch's
`FakeTensorMode` this has values, so that code which reads sizes from values runs, and a backward, on builds of torch
without CUDA. It cannot be undone, so it needs a process of its own.

`host_waits` tells where the host would wait for a real device, `most_bytes` what would be on it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sar

NAME = "gpu"
CPU = torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Operations that take tensors of both devices. Indices may be on the CPU, and numbers, tensors of no dimension."""
NUMBERS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.item}
"""Operations whose result is on the host."""
SIZES = {
    *(aten.nonzero, aten.bincount, aten.masked_select, aten.repeat_interleave),
    *(aten._unique, aten._unique2, aten.unique_consecutive, aten.unique_dim),
}
"""Operations whose result has a size that the host has to know first."""
ADDS = {aten.index_add.default, aten.index_add_.default}
"""Operations in which CUDA adds atomically, so in any order where an index comes twice."""
_SAR = f"{Path(sar.__file__).parent}/"
_waits: Counter[str] | None = None
_queued: list[tuple[Tensor, Tensor]] = []  # copies to the CPU that have not been waited for: places and values
_storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
_peak: int | None = None
_before = _since = 0  # bytes there when they were last added up, and of tensors used since then
_limit: int | None = None  # bytes that the device has
_resize = torch.UntypedStorage.resize_


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
        storage = real.untyped_storage()
        _storages[storage._cdata] = storage
        return made

    def __repr__(self, *args: Any) -> str:
        return f"{self.values_on_cpu!r} on {NAME}"

    def tolist(self) -> Any:
        return self.cpu().tolist()  # where what waits for the device is counted, and what waits on the host comes back

    def data_ptr(self) -> int:
        return self.values_on_cpu.data_ptr()

    def storage(self) -> Any:
        return self.values_on_cpu.storage()

    def untyped_storage(self) -> Any:
        return self.values_on_cpu.untyped_storage()

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
        own = {
            "get_amp_supported_dtype": lambda self: [],
            "Stream": _Stream,
            "current_stream": lambda *device: _computing,
        }
        module = type("Module", (registration._DummyBackendModule,), own | {"stream": nullcontext})
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


class _Stream:
    """Work that is done when it is queued, but for copies to the CPU."""

    def __init__(self, device: Any) -> None:
        """Of a device; each keeps memory of its own, so that an epoch needs no new ones."""
        _note_wait("a new stream")

    def wait_stream(self, other: "_Stream") -> None:
        """Come after what is queued there."""

    def synchronize(self) -> None:
        _note_wait("synchronize")
        for place, values in _queued:
            place.copy_(values)
        _queued.clear()


def _queue(place: Tensor, values: Tensor) -> Tensor:
    """Copy to the CPU when the host waits; until then other numbers are there."""
    _queued.append((place, values.clone()))
    return place.fill_(torch.nan if place.is_floating_point() else 77)


@contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """How often, inside, the host would wait for the device, in which function of sar, and what for.

    Also where streams are made, and where sums differ between runs.
    """
    global _waits
    _waits = Counter()
    try:
        yield _waits
    finally:
        _waits = None


def _note_wait(what: str) -> None:
    if _waits is None:
        return
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_SAR):
        frame = frame.f_back  # type: ignore[assignment]
    code = None if frame is None else frame.f_code
    if code is not None and code.co_filename == f"{_SAR}kernels/torch.py":
        return  # whose waits tests/kernels/test_backend.py looks for
    place = "the script" if code is None else f"{code.co_filename.removeprefix(_SAR)} {code.co_name}"
    _waits[f"{place}: {what}"] += 1


def _what_waits(func: Any, args: Any, kwargs: dict[str, Any], here: list["PretendTensor"]) -> str | None:
    """Why the host would wait in an operation of tensors of which some are `here`, on the device.

    Or that it adds floating-point numbers in any order.
    """
    kind = getattr(func, "overloadpacket", None)
    if func in ADDS and here and args[0].is_floating_point():
        index = _real(args[2])
        return "sums in any order" if len(index.unique()) < len(index) else None
    if func in COPIES and not kwargs.get("non_blocking") and not (func is aten.copy_.default and args[2:] == (True,)):
        from_device = isinstance(args[1 if func is aten.copy_.default else 0], PretendTensor)
        if func is aten.copy_.default:
            to_device = isinstance(args[0], PretendTensor)
        else:
            to_device = torch.device(kwargs.get("device") or args[0].device).type == NAME
        if from_device != to_device:
            return "to the CPU" if from_device else "to the device"
    if kind is aten.repeat_interleave and kwargs.get("output_size") is not None:
        return None
    if here and kind in NUMBERS | SIZES:
        return kind.__name__
    if here and func in INDEXED:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool for index in indices):
            return "a mask"
        if not all(isinstance(index, PretendTensor) for index in indices):
            return "indices of the CPU"
    return None


@contextmanager
def most_bytes(limit: int | None = None) -> Iterator[Callable[[], int]]:
    """What says how many bytes have been on the device inside, at most, after an operation; and how many it has."""
    global _peak, _before, _since, _limit
    _peak = _before = _since = 0
    _limit = limit
    torch.UntypedStorage.resize_ = _resize if limit is None else _resize_within_limit  # type: ignore[method-assign]
    try:
        yield lambda: _peak or 0
    finally:
        _peak = _limit = None
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]


def _there() -> int:
    return sum(storage.nbytes() for storage in list(_storages.values()))


def _full(nbytes: int) -> bool:
    return _limit is not None and nbytes > _limit


def _resize_within_limit(storage: torch.UntypedStorage, nbytes: int) -> Any:
    if storage._cdata in _storages and _full(_there() + nbytes - storage.nbytes()):
        raise torch.OutOfMemoryError("no memory on the device to resize a storage")
    return _resize(storage, nbytes)


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    here = [value for value in given if isinstance(value, PretendTensor)]
    if func in INDEXED and isinstance(args[0], PretendTensor):
        given = [args[0], *args[2:3]]  # indices may be on the CPU
    elsewhere = [value for value in given if not isinstance(value, PretendTensor) and value.dim()]
    if here and elsewhere and func not in COPIES:
        message = f"{func} of tensors on {NAME} and on the CPU"
        print(message, file=sys.stderr)  # an error in a backward ends the process
        raise RuntimeError(message)
    what = None if _waits is None else _what_waits(func, args, kwargs, here)
    if what is not None:
        _note_wait(what)
    if func is aten.copy_.default and args[2:] == (True,) and here and not isinstance(args[0], PretendTensor):
        return _queue(args[0], args[1].values_on_cpu)
    device = kwargs.get("device")
    if func is aten.copy_.default:
        on_device = isinstance(args[0], PretendTensor)
    else:
        on_device = bool(here) if device is None else torch.device(device).type == NAME
    if device is not None:
        kwargs = {**kwargs, "device": CPU}
    made = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    known = {id(value.values_on_cpu): value for value in here}  # what is changed in place stays what it is
    made = tree_map(lambda value: _on_device(value, known) if on_device else value, made)
    if _peak is not None:
        _note_bytes([*here, *(one for one in tree_leaves(made) if isinstance(one, PretendTensor))])
        if _full(_before):
            made = None  # which whoever catches the error could not let go of
            raise torch.OutOfMemoryError(f"no memory on the device for {func}")
    return made


_computing = _Stream(None)


def _note_bytes(used: list[PretendTensor]) -> None:
    """Add up what is there, where it can be more than ever."""
    global _peak, _since, _before
    _since += sum(one.untyped_storage().nbytes() for one in used)
    if _peak is not None and _before + _since > _peak:
        _before, _since = _there(), 0
        if not _full(_before):
            _peak = max(_peak, _before)


def _real(value: Any) -> Any:
    return value.values_on_cpu if isinstance(value, PretendTensor) else value


def _on_device(value: Any, known: dict[int, PretendTensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else PretendTensor(value)
