"""Runs a case, on workers or on one machine: the same program, which returns numbers or raises."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import dgl.function as fn
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad, softsign
from torch.utils.checkpoint import checkpoint

import sar
import sar.pyg
from tests.combinations.calls import CALLS, WIDTH, Scene
from tests.combinations.calls import Rows as Learned
from tests.combinations.cases import DTYPES, PLAIN, SETTINGS, Case
from tests.combinations.graphs import Share
from tests.parity.harness import Results, weighted_sum


class Raised(NamedTuple):
    """What a case raised."""

    kind: str
    message: str


class Model(nn.Module):
    """The layers of a case's calls."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.number)
        self.case = case
        self.first = CALLS[case.call].make()
        self.second = CALLS[case.second].make() if case.second != PLAIN else nn.Identity()
        with torch.no_grad():
            for value in self.parameters():  # none is 0, as biases are to begin with
                value.copy_(torch.randn(value.shape, dtype=torch.float64).mul(0.4))
        self.to(DTYPES[case.dtype])
        if not dist.is_initialized():
            self.double()

    def forward(self, h: Tensor, w: Tensor, scene: Scene) -> tuple[Tensor, ...]:
        """The rows that each call makes."""
        s = Scene(scene.graph, scene.nodes, scene.count, h, w)
        made = CALLS[self.case.call].run(self.first, s)
        if self.case.second == PLAIN:
            return (made,)
        if self.case.joined == "behind":
            flat = softsign(made.flatten(1)) + 0.1 * s.h[:, : made.flatten(1).shape[1]]
            s.h = pad(flat, (0, max(0, WIDTH - flat.shape[1])))[:, :WIDTH].to(h.dtype)
        return made, CALLS[self.case.second].run(self.second, s)


class Program:
    """One case on one worker, or on one machine in double precision."""

    def __init__(self, case: Case, share: Share) -> None:
        self.case, self.share = case, share
        self.on_worker = share.partition is not None
        self.dtype = DTYPES[case.dtype] if self.on_worker else torch.float64
        for columns in (share.data.nodes, share.data.edges):
            columns.update({name: rows.to(self.dtype) for name, rows in columns.items()})
        self.graph = share.graph(case.mode)
        self.model = Model(case)
        if case.inputs == "half of the weights frozen":
            for value in list(self.model.parameters())[::2]:
                value.requires_grad_(False)
        self._change_layers()
        self.x = self._leaf(share.data.nodes["x"], "x without gradient")
        self.w = self._leaf(share.data.edges["w"], "edges without gradient")
        self.results: Results = {}

    def _leaf(self, rows: Tensor, without: str) -> Tensor:
        rows = rows.clone()
        if self.case.inputs == "strided":
            rows = rows.t().contiguous().t()
        return rows.requires_grad_(self.case.inputs != without)

    def _change_layers(self) -> None:
        """Hooks and another forward, where a layer has a linear one inside."""
        linear = next(
            (m for m in self.model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Linear"), None
        )
        if linear is None:
            return
        if self.case.forward == "forward hook":
            linear.register_forward_hook(lambda module, given, made: 2 * made)
        elif self.case.forward == "forward pre-hook":
            linear.register_forward_pre_hook(lambda module, given: (given[0] * 0.5, *given[1:]))
        elif self.case.forward == "replaced forward":
            linear.forward = _Doubled(linear)

    # -- forward

    def forward(self) -> tuple[Tensor, ...]:
        """Rows that the calls make."""
        h = self.x[:, :1].expand(-1, WIDTH) if self.case.inputs == "expanded" else self.x * 1
        if self.case.backward == "gradient hook" and h.requires_grad:
            h.register_hook(lambda grad: 2 * grad)
        scene = self._scene(h, self.w * 1)
        self.given = scene.h
        call: Callable[..., Any] = self.model
        given = scene.h, scene.w
        how = self.case.forward
        if how == "checkpoint":
            return checkpoint(call, *given, scene, use_reentrant=False)
        if how == "reentrant checkpoint":
            return checkpoint(call, *given, scene, use_reentrant=True)
        if how == "weights made by a function":
            made = {name: 2 * value for name, value in self.model.named_parameters()}
            return torch.func.functional_call(self.model, made, (*given, scene))
        with self._surroundings():
            return call(*given, scene)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.case.forward == "saved on CPU":
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            elif self.case.forward == "autocast" and self.on_worker:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            yield

    def _scene(self, h: Tensor, w: Tensor) -> Scene:
        return Scene(self.graph, self.share.nodes, self.share.count, h, w)

    def loss(self, outputs: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=self.dtype)
        for name, rows in zip(self.case.calls, outputs, strict=True):
            data = self.share.data
            cotangent = data.edges["edge cotangent"] if CALLS[name].edges else data.nodes["cotangent"]
            total = total + weighted_sum(rows.to(self.dtype), cotangent)
        return total

    def keep(self, name: str, outputs: Sequence[Tensor]) -> None:
        for number, (call, rows) in enumerate(zip(self.case.calls, outputs, strict=True)):
            self.results[f"{'edge' if CALLS[call].edges else 'node'} {name} {number}"] = rows.detach().clone()

    # -- what comes between

    def before(self) -> None:
        if self.case.between == "inference mode before":
            with torch.inference_mode():
                self.model(*self._detached())

    def _detached(self) -> tuple[Any, ...]:
        scene = self._scene(self.x.detach(), self.w.detach())
        return scene.h, scene.w, scene

    def between(self) -> None:
        how, graph = self.case.between, self.graph
        if how == "settings changed" and self.on_worker:
            sar.Config.disable_sr = not sar.Config.disable_sr
            sar.Config.pipeline_depth, sar.Config.comm_buffer_bytes = 3, 256
        elif how == "fields overwritten":
            for frame, name in ((graph.srcdata, "h"), (graph.edata, "w")):
                if name in frame:
                    frame[name] = torch.full_like(frame[name], 100.0)
        elif how == "evaluation between":
            with torch.no_grad():
                self.keep("evaluation", self.model(*self._detached()))
        elif how == "weights changed":
            with torch.no_grad():
                for value in self.model.parameters():
                    value.mul_(3)
        elif how == "inputs changed":
            with torch.no_grad():
                self.given.mul_(2)  # no view: expanded rows are one another's memory
        elif how == "self-loops added":
            other = graph.add_self_loop()
            other.ndata["q"] = self.x.detach()
            other.update_all(fn.copy_u("q", "m"), fn.mean("m", "q"))
            self.results["node self-loops"] = other.ndata["q"]

    # -- backward

    def backward(self, loss: Tensor) -> None:
        how = self.case.backward
        if how == "autograd.grad":
            (grad,) = torch.autograd.grad(loss, [self.x], allow_unused=True)
            self.results["node autograd.grad"] = torch.zeros_like(self.x) if grad is None else grad
        elif how == "second derivative":
            (grad,) = torch.autograd.grad(loss, [self.x], create_graph=True, allow_unused=True)
            grad.square().sum().backward()
        else:
            loss.backward(retain_graph=how == "two backwards")
            if how == "two backwards":
                loss.backward()

    def run(self) -> Results:
        anomaly = self.case.forward == "anomaly mode"
        with torch.autograd.set_detect_anomaly(anomaly, check_nan=False) if anomaly else nullcontext():
            self.before()
            outputs = self.forward()
            self.keep("output", outputs)
            self.between()
            self.backward(self.loss(outputs))
        return {**self.results, **self.gradients()}

    def gradients(self) -> Results:
        """Of all that takes one; zeros where there is none."""
        found: Results = {}
        for name, leaf in (("node x", self.x), ("edge w", self.w)):
            if leaf.requires_grad:
                found[f"{name}.grad"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if self.on_worker:
            sar.gather_grads(self.model)
        for name, value in self.model.named_parameters():
            if value.requires_grad:
                found[f"same {name}.grad"] = torch.zeros_like(value) if value.grad is None else value.grad
        for number, layer in enumerate((self.model.first, self.model.second)):
            if isinstance(layer, Learned):
                found[f"node {number} rows.grad"] = layer.gradient()
        return found


class _Doubled:
    """A forward in the place of a linear layer's."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear, self.own = linear, type(linear).forward

    def __call__(self, given: Tensor) -> Tensor:
        made: Tensor = 2 * self.own(self.linear, given)
        return made


def run(case: Case, share: Share) -> Results | Raised:
    """The results, or what was raised."""
    try:
        return {name: rows.detach().double() for name, rows in Program(case, share).run().items()}
    except Exception as error:
        return Raised(type(error).__name__, str(error))


def run_on_worker(mine: Sequence[Share], cases: Sequence[Case]) -> list[Results | Raised]:
    """All cases, one after the other; after one that fails, all workers go on with the next."""
    sar.patch_dgl()
    before = {name: getattr(sar.Config, name) for name in sar.Config.__annotations__}
    sar.Config.timeout = 40.0
    kept = {**before, "timeout": 40.0}
    found: list[Results | Raised] = []
    for case, share in zip(cases, mine, strict=True):
        settings = SETTINGS[case.settings] | {"disable_sr": case.mode == "mode 2"}
        for name, value in (kept | settings).items():
            setattr(sar.Config, name, value)
        found.append(run(case, share))
        for name, value in kept.items():
            setattr(sar.Config, name, value)
        try:
            sar.all_sum(0)
        except sar.SarError:
            sar.recover()
    return found
