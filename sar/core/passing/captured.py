"""What a Python function depends on besides its arguments: captured tensors, random numbers, autocast and modules.

[Note: captured tensors]
A message function may use tensors that it is not given: parameters of a layer, or what a lambda captures. Autograd has
to see them as inputs of the call, and to save them. So they are looked for when the function is recorded: a tensor that
enters a torch operation and was not made in the run is one of them. In the runs that count, every torch operation gets
instead what autograd has saved of it, as a leaf where it needs a gradient. So a tensor that has changed since is an
error, a tile's gradients end there, and the tensors' own hooks run once for the call and not once for each tile. Only a
`torch.autograd.Function` of the user's that is given a captured tensor gets the tensor itself;
`DetachedLeaves.reached` finds those, whose gradients are asked for too. Between its runs a function keeps no tensor
that is a variable around it, so that checkpointing can free it; what it has as an attribute of something else stays.

[Note: fingerprints]
A function may also depend on what cannot be restored, such as a `torch.Generator` of its own or an attribute that has
changed: the backward would differentiate another function. So each run adds up its messages with weights by edge, and
the sums are compared, with a tolerance for operations that round differently each time. Messages that are relative to
a peak ([Note: softmax in a message]) have weights by destination, because only their sums are equal in both runs.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from numpy.random import mtrand
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from sar.core.passing.reductions import by_head
from sar.errors import GraphError
from sar.kernels import accumulation_dtype


class _SeeTensors(TorchFunctionMode):
    """Shows every tensor that enters a torch operation to `see`, and passes on what that returns."""

    def see(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def _see_all(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.see(argument)
        if type(argument) in (list, tuple):
            return type(argument)(map(self._see_all, argument))
        if isinstance(argument, tuple) and hasattr(argument, "_make"):  # a named one
            return argument._make(map(self._see_all, argument))
        if type(argument) is dict:
            return {key: self._see_all(value) for key, value in argument.items()}
        return argument

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._see_all(args), **self._see_all(kwargs or {}))


class FindCaptured(_SeeTensors):
    """Collects in `found` the tensors from outside that need a gradient, none of which is `given`.

    With `constants` it looks for tensors without gradient, too, and all that the run makes stays until its end.
    """

    def __init__(self, given: Iterable[Tensor], *, constants: bool = False) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self._versions: list[int] = []
        self._constants = constants
        self._known = {id(tensor) for tensor in given}
        self._inside: list[Tensor] = []  # alive, so that no other tensor gets their IDs
        with torch.inference_mode(False), torch.enable_grad():
            # Autograd numbers its nodes: those of tensors that are there already have lower numbers than this one.
            self._start = torch.zeros(0, requires_grad=True, device="cpu").view(-1).grad_fn._sequence_nr()  # type: ignore[union-attr]

    @property
    def captured(self) -> list[Tensor]:
        """What was found, but for constants that the run itself has changed, as it does a counter."""
        found = zip(self.found, self._versions, strict=True)
        return [tensor for tensor, version in found if tensor.requires_grad or tensor._version == version]

    def see(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._known or tensor.is_inference():  # which autograd could not save
            return tensor
        is_old = tensor.grad_fn is None or tensor.grad_fn._sequence_nr() < self._start
        if is_old and (tensor.requires_grad or self._constants):
            self._known.add(id(tensor))
            self.found.append(tensor)
            self._versions.append(tensor._version)
        return tensor

    def see_below(self, results: Iterable[Tensor]) -> None:
        """See those that no operation showed but autograd comes to from the results, as in code of TorchScript."""
        found = {(tensor.grad_fn, tensor.output_nr) for tensor in self.found}
        seen, waiting = {(None, 0), *found}, [(result.grad_fn, result.output_nr) for result in results]
        while waiting:
            if (end := waiting.pop()) in seen:
                continue
            seen.add(end)
            node: Any = end[0]
            if (variable := getattr(node, "variable", None)) is not None:
                self.see(variable)
            elif node._sequence_nr() < self._start:
                raise GraphError(
                    "A message function gives code that torch cannot look into, such as that of TorchScript, a tensor "
                    "that is computed before the call and needs a gradient; set it as a field."
                )
            else:
                waiting += node.next_functions

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            attribute = func(*args)
            if not isinstance(attribute, Tensor):  # such as a shape, which is no use of values
                return attribute
        result = super().__torch_function__(func, types, args, kwargs)
        for made in _tensors_in(result):
            is_leaf = made.requires_grad and made.is_leaf  # which the function makes for itself
            if (is_leaf or self._constants) and id(made) not in self._known:
                self._known.add(id(made))
                self._inside.append(made)
        return result


def _tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for one in result:
            yield from _tensors_in(one)


class Captured:
    """The captured tensors of a function, and a copy of the function; neither keeps the tensors between its runs.

    The copy has the values that the variables around the function have now, as a run may come when the variable of a
    loop around a lambda has moved on.
    """

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        self.tensors = [TensorWeakRef(tensor) for tensor in tensors]
        self.function = function
        self.cells: list[tuple[CellType, int]] = []
        if not isinstance(function, FunctionType) or not function.__closure__:
            return
        cells = tuple(CellType(cell.cell_contents) if _is_bound(cell) else cell for cell in function.__closure__)
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
        copy.__dict__.update(function.__dict__)
        self.function = copy
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        for cell, theirs in zip(cells, function.__closure__, strict=True):
            if cell is not theirs and id(cell.cell_contents) in numbers:
                self.cells.append((cell, numbers[id(cell.cell_contents)]))
                del cell.cell_contents


def _is_bound(cell: CellType) -> bool:
    return cell != CellType()  # else the variable around the function has no value yet


class DetachedLeaves(_SeeTensors):
    """Puts what is saved of captured tensors in their place, inside: those that need a gradient are leaves.

    `used` are the numbers of the tensors that the function has used so far, but for variables around it.
    """

    def __init__(self, captured: Captured, saved: Sequence[Tensor]) -> None:
        super().__init__()
        self.leaves = [each.detach().requires_grad_() if each.requires_grad else each for each in saved]
        self.captured = [tensor() for tensor in captured.tensors]  # None where only autograd has it still
        self.used: set[int] = set()
        self._number_of = {id(tensor): number for number, tensor in enumerate(self.captured)}
        self._cells = captured.cells

    def __enter__(self) -> "DetachedLeaves":
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
        if number is None:
            return tensor
        self.used.add(number)
        return self.leaves[number]

    def reached(self, results: Iterable[Tensor]) -> list[int]:
        """Which of the captured tensors themselves, by number, autograd would come to first from the results.

        An error where their gradients could not be told apart, or a hook would run more than once.
        """
        found = self._first_reached((result.grad_fn, result.output_nr) for result in results)
        for number in found:
            tensor = self.captured[number]
            assert tensor is not None  # an autograd function was given it
            below = set() if tensor.grad_fn is None else self._first_reached(tensor.grad_fn.next_functions)
            if below & found or tensor._backward_hooks or tensor.retains_grad:
                raise GraphError(
                    "A message function gives an autograd function of yours a tensor that has a hook, or two of which "
                    "one is made of the other; give it `tensor.view_as(tensor)` in place of each."
                )
        return sorted(found)

    def _first_reached(self, ends: Iterable[Any]) -> set[int]:
        # Where autograd comes to a tensor: an output of a node, or the leaf itself.
        numbers: dict[Any, int] = {
            (tensor, 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr): number
            for number, tensor in enumerate(self.captured)
            if tensor is not None and tensor.requires_grad
        }
        found, seen, waiting = set(), set(), list(ends)
        while waiting:
            node, output = waiting.pop()
            if node is None or (node, output) in seen:
                continue
            seen.add((node, output))
            variable = getattr(node, "variable", None)
            number = numbers.get((node, output) if variable is None else (variable, 0))
            if number is not None:
                found.add(number)
            else:
                waiting += node.next_functions
        return found


def _modules(function: Any) -> list[nn.Module]:
    """The modules that a function is or reaches: by its object, variables around it, and globals that it names."""
    inner = getattr(function, "__func__", function)
    around = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_bound(cell)]
    if isinstance(inner, FunctionType):
        around += [inner.__globals__.get(name) for name in inner.__code__.co_names]
    reached = [getattr(function, "__self__", function), *around]
    return [module for each in reached if isinstance(each, nn.Module) for module in each.modules()]


class AmbientState:
    """Random generators, autocast and the modes of a function's modules as they are when this is made."""

    def __init__(self, device: torch.device, function: Callable[..., Any]) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        self._modules = _modules(function)
        self._states = self._take()
        self._autocast = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", device.type})
            if torch.amp.is_autocast_available(kind)  # not for tensors without values
        ]

    def _take(self) -> list[tuple[Callable[[Any], object], Any]]:
        """The states as they are now, each with the function that puts it back."""
        return [
            (torch.set_rng_state, torch.get_rng_state()),
            (mtrand.set_state, mtrand.get_state(legacy=False)),
            (random.setstate, random.getstate()),
            *((partial(torch.cuda.set_rng_state, device=each), torch.cuda.get_rng_state(each)) for each in self._cuda),
            *((partial(setattr, module, "training"), module.training) for module in self._modules),
        ]

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast as it was, without its cache: that would keep what was cast without gradients."""
        with ExitStack() as stack:
            for as_it_was in self._autocast:
                stack.enter_context(as_it_was(cache_enabled=False))
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All of it as it was; afterwards it goes on as before."""
        with self.autocast(), ExitStack() as stack:
            for (put, before), (_, state) in zip(self._take(), self._states, strict=True):
                stack.callback(put, before)
                put(state)
            yield


class Fingerprint:
    """Sums of a run's messages, weighted by their places: see [Note: fingerprints]."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.complex128, device=device)
        self._squares = torch.zeros(4, dtype=torch.float64, device=device)
        self._share = 0.0  # by which they may differ

    def add(self, values: Tensor, places: Tensor, *, relative: bool = False) -> None:
        """Take in (n, ...) messages, or sums of those that are `relative` to a peak, and their places, (n,) integer."""
        if not values.is_floating_point() and not values.is_complex():  # which take no gradient
            return
        eps = torch.finfo(values.dtype).eps
        # Of those relative to a peak many are added up before, and halves are rounded at another peak.
        share = max(4 * eps, min(eps ** (1 / 2), 4e-4)) if relative else max(eps, min(eps ** (2 / 3), 4e-4))
        self._share = max(self._share, share)
        rows = by_head(values.to(accumulation_dtype(values.dtype)))
        rows = rows if relative else rows.nan_to_num(1, 1, 1)  # a maximum may be of some that are infinite
        weights = _weights(torch.arange(rows.shape[1], device=rows.device)).to(rows.dtype)
        with torch.autocast("cpu" if rows.is_meta else rows.device.type, enabled=False):
            weighted = (rows @ weights) * _weights(places)
        self._sums += weighted.sum(0)
        self._squares += weighted.abs().square().sum(0)

    def equals(self, first: "Fingerprint") -> bool:
        """Whether this may be of the same messages as the first run's."""
        size = torch.maximum(self._squares, first._squares).sqrt() + first._sums.abs()
        same = (self._sums - first._sums).abs() <= self._share * size
        return same.is_meta or bool((same | ~first._sums.isfinite()).all())


def _weights(places: Tensor) -> Tensor:
    """Four numbers between 0.5 and 1.5 for each place, (n, 4) float64."""
    steps = torch.arange(2, 6, dtype=torch.float64, device=places.device).log()
    return (places.unsqueeze(1) + 1) * steps % 1 + 0.5
