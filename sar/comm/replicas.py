"""Whether the model is the same on all workers: checksums of what optimizers have stepped.

[Note: replicas]
Every worker has a copy of the model, and nothing but equal beginnings and equal gradients keeps the copies equal. So
after a step of an optimizer a checksum of its parameters' bits rides along in the next agreement. Where checksums
differ, the workers tell each other those of every parameter. One that has been in `sync_params` or `gather_grads` must
be the same everywhere. Where none of a step has, because both were forgotten, so must all of which every worker has as
many of that shape. What is left is a worker's own, such as rows for its nodes or a model that it alone trains, and no
longer counts. Tensors that are no `torch.nn.Parameter` never do, nor do steps before models are averaged (`apart`).

On the CPU checksums are CRC-32. Those of models on a device are made there, and read in the next agreement, all at
once: copying the parameters would take longer than the step. So all workers have their models on alike devices.
"""

import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from sar.config import Config
from sar.errors import DisagreementError
from sar.id_slices import pieces
from sar.logging_setup import logger
from sar.tensor_views import as_bytes, materialize

NOT_STEPPED: Final = 0
NOT_CHECKED: Final = 1
"""What an agreement carries where no optimizer has stepped, and where `Config.check_replicas` is off."""

PIECE: Final = 2**18
"""Elements that `_sum_of_bits` takes at once."""
STEP: Final = 0x9E3779B97F4A7C15 - 2**64  # of SplitMix64, as int64
LOW: Final = 2**32 - 1
INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class _Stepped(NamedTuple):
    """A parameter after a step."""

    key: str  # those with equal keys are compared with each other, in order
    name: str
    seen_by: list[str]  # which of `sync_params` and `gather_grads` it has been in
    checksum: int | Tensor  # a tensor, (), until the next agreement, where the parameter is not on the CPU
    device: str  # its type


class Replicas:
    """What this worker's optimizers have stepped since the latest agreement: see [Note: replicas].

    With `of_thread`, it looks only at steps in the thread that makes this; else at all of the process.
    """

    def __init__(self, *, of_thread: bool = False) -> None:
        self._thread = threading.get_ident() if of_thread else None
        self._shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> (its name, `seen_by`)
        self._stepped: dict[Optimizer, list[_Stepped]] = {}  # until the next agreement, even if the optimizer goes
        self._told: list[_Stepped] = []  # what the latest agreement was about
        self._own: set[str] = set()  # keys of what is not compared
        self._apart = False
        self._hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._look(optimizer))

    def close(self) -> None:
        """Look at no further steps."""
        self._hook.remove()

    def share(self, model: Module, call: str) -> bool:
        """Note that a model's parameters should be the same on all workers; return whether any of them is new."""
        before = len(self._shared)
        for name, parameter in model.named_parameters():
            _, seen_by = self._shared.setdefault(parameter, (name, []))
            if call not in seen_by:
                seen_by.append(call)
        return len(self._shared) > before

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this worker's models go their own way inside; then they are to become one again."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def take_checksum(self) -> int:
        """What the next agreement carries, once."""
        told = [one for steps in self._stepped.values() for one in steps if one.key not in self._own]
        sums = [one.checksum for one in told if isinstance(one.checksum, Tensor)]
        numbers = iter(torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else [])  # in one copy
        self._told = [one._replace(checksum=next(numbers)) if isinstance(one.checksum, Tensor) else one for one in told]
        self._stepped = {}
        if not Config.check_replicas:
            return NOT_CHECKED
        text = repr([(one.key, one.checksum) for one in self._told])
        return 1 << 32 | zlib.crc32(text.encode()) if self._told else NOT_STEPPED

    def compare(self, checksums: list[int], gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Raise, on all workers, if a parameter is why their checksums differ; `gather` is `Group.all_gather`."""
        if NOT_CHECKED in checksums:
            off = [rank for rank, checksum in enumerate(checksums) if checksum == NOT_CHECKED]
            raise DisagreementError(f"Config.check_replicas is False on workers {off} only; set it alike on all.")
        workers = [[_Stepped(*one) for one in told] for told in all_gather_json(gather, self._told)]
        known = {one.key: one for worker in workers for one in worker}
        any_shared = any(one.seen_by for one in known.values())
        for key, one in known.items():
            theirs = [[other for other in worker if other.key == key] for worker in workers]
            sums = [[other.checksum for other in of_worker] for of_worker in theirs]
            if all(of_worker == sums[0] for of_worker in sums):
                continue
            if one.seen_by or (not any_shared and len(set(map(len, theirs))) == 1):
                devices = {other.device for of_worker in theirs for other in of_worker}
                raise DisagreementError(self._message(one, sums, sorted(devices)))
            logger.warning("%s is not on all workers alike, and is not compared", one.name)
            self._own.add(key)

    def _message(self, one: _Stepped, theirs: list[list[int | Tensor]], devices: list[str]) -> str:
        if len(devices) > 1:
            return (
                f"{one.name} is on {' on some workers, and on '.join(devices)} on others, where its bits cannot be "
                "compared. Have the model on one kind of device on all, or set Config.check_replicas = False on all."
            )
        other = next(rank for rank, checksums in enumerate(theirs) if checksums != theirs[0])
        found = f"The workers' models are not the same: {one.name} differs between worker 0 and worker {other}"
        idle = [rank for rank, checksums in enumerate(theirs) if not checksums]
        if idle:
            return f"{found}: no optimizer has stepped it on workers {idle}. Call optimizer.step() on all, or on none."
        hints = {
            "sync_params": "sync_params(model), which gives all workers the model of worker 0, has not been called. ",
            "gather_grads": "gather_grads(model), which sums the gradients once per step, before optimizer.step(), has "
            "not been called (nor, perhaps, ddp_sum_hook registered). ",
        }
        missing = "".join(hint for call, hint in hints.items() if call not in one.seen_by)
        why = missing or (
            "Something has changed it on some workers only, after sync_params and gather_grads. Or a learning rate "
            "differs, as where a scheduler is stepped by a worker's own loss: sar.all_sum makes it that of all. "
        )
        return (
            f"{found} after optimizer.step(). {why}\nIf it is meant to differ, such as a mask with a row for each of a "
            "worker's own nodes, as an Explainer's: set Config.check_replicas = False on all workers, or make it a "
            "tensor that requires a gradient, not a torch.nn.Parameter."
        )

    def _look(self, optimizer: Optimizer) -> None:
        """Take the checksums of what an optimizer has just stepped."""
        elsewhere = self._thread not in (None, threading.get_ident())
        if elsewhere or self._apart or not Config.check_replicas or torch.compiler.is_compiling():
            return
        steps = self._stepped[optimizer] = []
        parameters = [p for group in optimizer.param_groups for p in group["params"] if _counts(p)]
        for number, p in enumerate(parameters):
            shape, device = described(p), p.device.type
            checksum = zlib.crc32(as_bytes(p)) if device == "cpu" else _sum_of_bits(p)
            name, seen_by = self._shared.get(p, (f"parameter {number} of {type(optimizer).__name__}", []))
            key = f"{name} {shape}" if seen_by else shape
            steps.append(_Stepped(key, f"{name}, {shape},", seen_by, checksum, device))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """A checksum made where the tensor is, () int64: one changed element always changes it."""
    bits = materialize(tensor.detach()).contiguous().view(-1)
    bits = bits.view(INTEGERS[min(bits.element_size(), 8)])
    weights = _weights(bits.device)
    total = weights.new_zeros(())
    for piece in pieces(len(bits), PIECE):  # int64 wraps around
        mixed = bits[piece].to(torch.int64) * STEP
        mixed ^= (mixed >> 32) & LOW  # else a changed sign would be the same at every place
        total = total * STEP + (mixed * weights[: len(mixed)]).sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers without a pattern, (PIECE,) int64, the same everywhere."""
    with torch.inference_mode(False):
        numbers = torch.arange(1, PIECE + 1, device="cpu") * STEP
        return ((numbers ^ (numbers >> 29)) * STEP | 1).to(device)


def _counts(parameter: Tensor) -> bool:
    """Whether it may be a replica whose bits can be read."""
    plain = isinstance(parameter, Parameter) and type(parameter.data) is Tensor
    return plain and parameter.layout is torch.strided and not parameter.is_meta


def described(tensor: Tensor) -> str:
    """Dtype and shape, for texts."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def all_gather_json(gather: Callable[[Tensor], list[Tensor]], value: Any) -> list[Any]:
    """Every worker's value, by rank, as JSON has it, within an agreed call; `gather` is `Group.all_gather`."""
    own = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device="cpu")
    lengths = [int(length) for length in gather(torch.tensor([len(own)], device="cpu"))]
    padded = torch.cat([own, own.new_zeros(max(lengths) - len(own))])
    return [json.loads(bytes(one[:length].tolist())) for one, length in zip(gather(padded), lengths, strict=True)]
