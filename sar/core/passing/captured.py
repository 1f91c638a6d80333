"""Implicit inputs of a Python message function: captured tensors, random numbers, autocast and modules.

[Note: captured tensors]
A message function may use tensors that are not its arguments: parameters of a layer, or variables around a lambda.
Autograd has to see them as inputs of the call, and to save them. So we look for them when we record the function: a
tensor that enters a torch operation and was not created in the run is captured. In the actual runs, every torch
operation gets a leaf with the values that autograd has saved instead. So autograd raises if a captured tensor has
changed, gradients of a tile stop at the leaf, and the tensor's own hooks run once for the call and not once for each
tile. Code that torch cannot look into, such as TorchScript, gets the captured tensor itself, and so does the user's own
`torch.autograd.Function` if it gets an attribute. The gradient would be lost, so `StandIns.refuse_hidden` raises.
Between its runs we remove captured tensors from a function's closure, so that checkpointing can free them. Attributes
of other objects remain.

[Note: fingerprints]
A function may also depend on state that we cannot restore, such as its own `torch.Generator` or an attribute that
has changed. Then the backward would differentiate another function. So we compare the bits of all messages: each 32
bits are multiplied by a random number for their position, the product of one for the edge and one for the column, and
the sum modulo 2**64 is the hash. It does not depend on the order of the tiles. Both runs compute the same bits, because
autograd records both: torch chooses some of its algorithms by that. Messages relative to a peak ([Note: softmax in a
message]) are rounded differently at another peak. For these we compare the bits of the scores, and weighted sums by
destination with a tolerance.
"""

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

from sar.core.passing.reducers import by_head
from sar.errors import GraphError
from sar.kernels import accumulation_dtype
from sar.tensors.splitmix import mix_tensor
from sar.tensors.views import materialize


class _SeeTensors(TorchFunctionMode):
    """Mode that replaces every tensor that enters a torch operation by `see(tensor)`.

    `known` are tensors that are not captured, by ID. Leaves that the function creates are added, and, if `constants`,
    all results of operations. They stay alive, so that no other tensor gets their IDs.
    """

    constants = False

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor): tensor for tensor in known}

    def see(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" and not isinstance(attribute := func(*args), Tensor):
            return attribute  # reading a shape, for example, does not use a tensor's values
        args, kwargs = tree_map_only(Tensor, self.see, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and (self.constants or (each.requires_grad and each.is_leaf)):
                self.known[id(each)] = each
        return result


_HIDDEN = (
    "A message function uses a tensor that needs a gradient and that sar does not see. It uses it on some edges only; "
    "or uses other tensors in the backward than in the forward, as after torch.func.functional_call; or it gives it to "
    "code that torch cannot look into, such as TorchScript, a compiled module, or your own autograd function. Let it "
    "use the same tensors whenever it is called, from variables around it; give such code `tensor.view_as(tensor)`; or "
    "set the tensor as a field."
)


class FindCaptured(_SeeTensors):
    """Mode that finds the tensors that a function captures in a run; `arguments` are those of the run."""

    constants = True

    def __init__(self, arguments: Iterable[Tensor]) -> None:
        super().__init__(arguments)
        self._found: list[tuple[Tensor, int]] = []
        with torch.inference_mode(False), torch.enable_grad():
            # Autograd numbers its nodes, so those of existing tensors have lower numbers than this one.
            self._start = torch.zeros(0, requires_grad=True, device="cpu").view(-1).grad_fn._sequence_nr()  # type: ignore[union-attr]

    def see(self, tensor: Tensor) -> Tensor:
        is_old = tensor.grad_fn is None or tensor.grad_fn._sequence_nr() < self._start
        if is_old and id(tensor) not in self.known and not tensor.is_inference():  # autograd cannot save these
            self.known[id(tensor)] = tensor
            self._found.append((tensor, tensor._version))
        return tensor

    def captured(self, results: Iterable[Tensor]) -> list[Tensor]:
        """The captured tensors, without constants that the run itself has changed, such as a counter."""
        captured = [tensor for tensor, version in self._found if tensor.requires_grad or tensor._version == version]
        seen = [*captured, *(tensor for tensor in self.known.values() if tensor.is_leaf)]
        if any(result.requires_grad for result in results) and not any(tensor.requires_grad for tensor in seen):
            raise GraphError(_HIDDEN)
        return captured


_EMPTY = CellType()
"""Equal to the cells of closure variables that have no value yet."""


class Captured:
    """The captured tensors of a function, and a copy of the function. Neither keeps the tensors alive between runs.

    The copy has separate closure variables, because the original ones may change before the backward, as in a loop.
    """

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        self.tensors = [TensorWeakRef(tensor) for tensor in tensors]
        self.function = function
        self.cells: list[tuple[CellType, int]] = []  # closure cells of captured tensors, and their numbers
        if not isinstance(function, FunctionType) or not function.__closure__:
            return
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        cells = [cell if cell == _EMPTY else CellType(cell.cell_contents) for cell in function.__closure__]
        for cell, original in zip(cells, function.__closure__, strict=True):
            if cell is not original and id(cell.cell_contents) in numbers:
                self.cells.append((cell, numbers[id(cell.cell_contents)]))
                del cell.cell_contents
        copy = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
        copy.__dict__.update(function.__dict__)
        self.function = copy


class StandIns(_SeeTensors):
    """Mode that replaces captured tensors by their saved values, as leaves if they need a gradient."""

    def __init__(self, captured: Captured, saved: Sequence[Tensor]) -> None:
        self.leaves = [each.detach().requires_grad_() if each.requires_grad else each for each in saved]
        super().__init__(self.leaves)
        self.captured = [tensor() for tensor in captured.tensors]  # None if only autograd still has the tensor
        self._number_of = {id(tensor): number for number, tensor in enumerate(self.captured)}
        self._cells = captured.cells

    def __enter__(self) -> "StandIns":
        for cell, number in self._cells:
            cell.cell_contents = self.leaves[number]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for cell, _ in self._cells:
            del cell.cell_contents

    def see(self, tensor: Tensor) -> Tensor:
        number = self._number_of.get(id(tensor))
        return tensor if number is None else self.leaves[number]

    def refuse_hidden(self, results: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
        """Raise if results depend on tensors that need a gradient, apart from `leaves` and those of this mode."""
        known = self.known.keys() | map(id, leaves)
        self.known = {id(leaf): leaf for leaf in self.leaves}  # frees the leaves that the function has created
        waiting, passed = [result.grad_fn for result in results], set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in passed:
                continue
            passed.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise GraphError(_HIDDEN)
            waiting += [before for before, _ in node.next_functions]


class AmbientState:
    """Snapshot of the random generators, of autocast and of the training modes of a function's modules."""

    def __init__(self, device: torch.device, function: Callable[..., Any]) -> None:
        self._switches: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (partial(mtrand.get_state, legacy=False), mtrand.set_state),
            (random.getstate, random.setstate),
        ]
        if device.type == "cuda":
            get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
            self._switches.append((partial(get, device), partial(put, device=device)))
        while isinstance(function, partial):
            function = function.func
        # Modules that the function is or uses: its object, closure variables, and the globals that it names.
        inner = getattr(function, "__func__", function)
        reached = [getattr(function, "__self__", function)]
        reached += [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if cell != _EMPTY]
        if isinstance(inner, FunctionType):
            reached += [inner.__globals__.get(name) for name in inner.__code__.co_names]
        self.identity = tuple(map(_identity, reached))  # keeps nothing of it alive
        self.modules = [module for each in reached if isinstance(each, nn.Module) for module in each.modules()]
        for module in self.modules:
            self._switches.append((partial(getattr, module, "training"), partial(setattr, module, "training")))
        self._states = [get() for get, _ in self._switches]
        self._autocast = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", device.type})
            if torch.amp.is_autocast_available(kind)  # not for tensors without values
        ]

    def has_changed(self) -> bool:
        """Whether the state has changed since, for example because random generators have advanced."""
        present = tree_leaves([get() for get, _ in self._switches])
        return not all(map(np.array_equal, tree_leaves(self._states), present))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context that restores autocast, without its cache, which would keep casts made without gradients."""
        with ExitStack() as stack:
            for as_it_was in self._autocast:
                stack.enter_context(as_it_was(cache_enabled=False))
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context with the saved state. The current state is restored at the end."""
        with self.autocast(), ExitStack() as stack:
            for (get, put), state in zip(self._switches, self._states, strict=True):
                stack.callback(put, get())
                put(state)
            yield

    @contextmanager
    def with_spare_modules(self) -> Iterator[None]:
        """Context with the saved state that restores attributes and buffers of the function's modules at the end.

        TorchScript modules are not restored.
        """
        modules = [module for module in self.modules if isinstance(module._buffers, dict)]
        owners = [owner for module in modules for owner in (vars(module), module._buffers)]
        before = [dict(owner) for owner in owners]
        with self.restored():
            try:
                for module in modules:
                    buffers = module._buffers
                    buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
                yield
            finally:
                for owner, old in zip(owners, before, strict=True):
                    owner.clear()
                    owner.update(old)


def _identity(used: Any) -> Any:
    """A value that identifies an object that a function uses."""
    if isinstance(used, nn.Module):
        return weakref.ref(used)
    if isinstance(used, FunctionType | MethodType):
        return used.__code__
    return used if isinstance(used, str | bool) else type(used)


@contextmanager
def recorded_alike(needed: bool) -> Iterator[None]:
    """Context of a first run that autograd records, as it will record a second run.

    Hooks on saved tensors, such as those of checkpoints, do not see tensors without a backward. We save aliases,
    because a result that its own node keeps would never be freed.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
    with torch.set_grad_enabled(needed), hooks if needed else nullcontext():
        yield


class Fingerprint:
    """Digest of a run's messages, to compare two runs: see [Note: fingerprints]."""

    def __init__(self, device: torch.device) -> None:
        self._hashes: dict[str, Tensor] = {}
        self._sums = torch.zeros(4, dtype=torch.complex128, device=device)
        self._squares = torch.zeros(4, dtype=torch.float64, device=device)
        self._share = 0.0  # relative tolerance of a comparison of sums

    def add(self, name: str, values: Tensor, places: Tensor) -> None:
        """Add the bits of (n, ...) values with their positions, (n,) int64."""
        if values.numel() == 0:  # strides are arbitrary then, so there may be no view as bytes
            return
        rows = by_head(materialize(values)).contiguous().view(torch.uint8)
        words = rows.view(torch.int32 if rows.shape[1] % 4 == 0 else torch.uint8).long()
        columns = mix_tensor(torch.arange(1, words.shape[1] + 1, device=words.device)) | 1
        hashes = words @ columns if words.is_cpu else (words * columns).sum(1)  # CUDA has no products of integers
        total = (hashes * (mix_tensor(-1 - places) | 1)).sum()
        self._hashes[name] = self._hashes[name] + total if name in self._hashes else total

    def add_sums(self, values: Tensor, places: Tensor) -> None:
        """Add (n, ...) messages relative to a peak, or sums of these, with their positions, (n,) int64."""
        eps = torch.finfo(values.dtype).eps
        # Sums are rounded in another order, and half precisions at another peak, in each run.
        self._share = max(self._share, 4 * eps, min(eps ** (1 / 2), 4e-4))
        rows = by_head(values.to(accumulation_dtype(values.dtype)))
        weights = _weights(torch.arange(rows.shape[1], device=rows.device)).to(rows.dtype)
        with torch.autocast("cpu" if rows.is_meta else rows.device.type, enabled=False):
            weighted = (rows @ weights) * _weights(places)
        self._sums += weighted.sum(0)
        self._squares += weighted.abs().square().sum(0)

    def equals(self, first: "Fingerprint") -> bool:
        """Whether both runs' messages have the same bits, and their sums are equal up to the tolerance."""
        size = torch.maximum(self._squares, first._squares).sqrt() + first._sums.abs()
        same = (self._sums - first._sums).abs() <= self._share * size
        if same.is_meta:
            return True
        hashes, others = ({name: int(each) for name, each in run._hashes.items()} for run in (self, first))
        return hashes == others and bool((same | ~first._sums.isfinite()).all())


def _weights(places: Tensor) -> Tensor:
    """Four weights between 0.5 and 1.5 for each position, (n, 4) float64."""
    steps = torch.arange(2, 6, dtype=torch.float64, device=places.device).log()
    return (places.unsqueeze(1) + 1) * steps % 1 + 0.5
