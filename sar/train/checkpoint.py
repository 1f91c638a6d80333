"""Saves and loads the complete training state: `save_checkpoint` and `load_checkpoint`; and models: `save_model`.

[Note: what is saved where]
Worker 0 writes the state that is the same on all workers, that is the model and the state of torch's optimizers and
schedulers, after all workers have compared it. Every worker writes its own state: random states, loaders, buffers that
differ, and rows of embeddings with their optimizer state. Rows are stored by original node IDs, to support any
partitioning. [Note: versions] describes how versions are written and survive a kill.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten_with_path

from sar.comm import session
from sar.comm.group import Group
from sar.comm.replicas import refuse_sharded
from sar.common_tuples import StrPath
from sar.data.versions import Version, find_rows, newest_version, write_file, write_version
from sar.errors import CheckpointError, CommunicationError, ConfigError
from sar.logging_setup import logger
from sar.nn.embedding import DistEmbedding, SparseOptimizer
from sar.tensors.views import as_bytes


class Loader(Protocol):
    """A `sar.DataLoader`, or another object with such a state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


def save_model(path: StrPath, model: nn.Module) -> None:
    """Save a trained model to one file for use without sar. All workers call this together, and worker 0 writes.

    `torch.load(path, weights_only=True)` returns a state dict on the CPU that the plain model's `load_state_dict`
    accepts: prefixes of `DistributedDataParallel` and `torch.compile` are removed, and the state of `DistributedBN1D`
    fits `BatchNorm1d`. Rows of a `DistEmbedding` are not included.

    Args:
        path: the file. Its folder is created if missing. An earlier file is replaced once the new one is on disk.
        model: parameters must be the same on all workers; buffers, such as running statistics, are worker 0's.

    Raises:
        CheckpointError: parameters differ between workers, or the file cannot be written.
        CommunicationError: another worker raised, or made a different call.
    """
    with session.current_group().guard() as group:
        refuse_sharded(model, "save_model")
        _differing_buffers(group, model, {"model": dict(model.named_parameters())})
        if group.rank == 0:
            write_file(Path(path), _plain_state(model))
        group.agree("the model is saved")


def copied_state(model: nn.Module) -> dict[str, Any]:
    """Copy a model's state to the CPU."""
    state = model.state_dict()
    return {key: x.to("cpu", copy=True) if isinstance(x, Tensor) and not is_lazy(x) else x for key, x in state.items()}


def _plain_state(model: nn.Module) -> dict[str, Any]:
    """A model's state on the CPU, with the prefixes of wrappers removed from names."""
    # torch.distributed.checkpoint has this, but takes 47 MB and a second to import.
    wrappers = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.parallel.DistributedDataParallel) or "_orig_mod" in module._modules  # torch.compile
    }
    state = {}
    for name, value in copied_state(model).items():
        parts = name.split(".")
        state[".".join(part for i, part in enumerate(parts) if ".".join(parts[:i]) not in wrappers)] = value
    return state


def save_checkpoint(
    folder: StrPath,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    step: int = 0,
    embeddings: DistEmbedding | Sequence[DistEmbedding] | None = None,
    loaders: Loader | Sequence[Loader] | None = None,
    extra: Any = None,
    keep: int = 2,
) -> None:
    """Save the training state so that it can be resumed. All workers must call this together.

    Also saves the random states of torch, numpy and Python. With the same workers and partitioning, resumed training is
    bitwise identical. The checkpoint is named `step-NUMBER` and is on disk before an old one is deleted. The file
    `latest` in the folder contains its name, for people and scripts.

    Args:
        folder: folder of this job's checkpoints, which all workers share; created if missing.
        model: the model. Parameters are the same on all workers; buffers, such as running statistics, may differ.
        optimizer: an optimizer or a list: of torch, with parameters that are the same on all workers, or `SparseAdam`
            or `SparseAdagrad`, which are saved with their embeddings.
        scheduler: a learning rate scheduler or a list, the same on all workers.
        step: step of training, at least 0. Default 0.
        embeddings: embeddings that neither `model` nor an optimizer contains.
        loaders: `sar.DataLoader`s, to save their position in the epoch, and other objects with a `state_dict` on each
            worker, such as `EarlyStopping`.
        extra: additional values, saved from worker 0: tensors, numbers, strings, and lists, tuples and dictionaries of
            these.
        keep: number of most recent checkpoints to keep, at least 1. Default 2.

    Raises:
        CheckpointError: a file cannot be written, `extra` cannot be read back, or parameters, optimizer states or
            scheduler states differ between workers. Earlier checkpoints are kept.
        ConfigError: `step` or `keep` is out of range.
        CommunicationError: another worker raised, or made a different call.
    """
    group, optimizers = session.current_group(), _several(optimizer)
    with group.guard():
        if step < 0 or keep < 1:
            raise ConfigError(f"step is {step} and keep {keep}; expected at least 0 and 1.")
        _check_whole("save_checkpoint", model, optimizers)
        alike: dict[str, Any] = {
            "model": {} if model is None else model.state_dict(),
            "optimizers": [
                one.state_dict() | ({"state": {}} if isinstance(one, SparseOptimizer) else {}) for one in optimizers
            ],  # state of rows is saved with the rows
            "schedulers": [one.state_dict() for one in _several(scheduler)],
        }
        differing = _differing_buffers(group, model, alike)
        part = {
            "random": _random_state(),
            "loaders": [loader.state_dict() for loader in _several(loaders)],
            "buffers": {name: alike["model"][name] for name in differing},
            "rows": {
                str(number): emb.rows(sparse).packed()
                for number, (emb, sparse) in enumerate(_embeddings(model, optimizers, _several(embeddings)))
            },
        }
    write_version(folder, step, part, {"extra": extra, **alike}, keep)


def load_checkpoint(
    folder: StrPath,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    step: int | None = None,
    embeddings: DistEmbedding | Sequence[DistEmbedding] | None = None,
    loaders: Loader | Sequence[Loader] | None = None,
    missing_ok: bool = False,
) -> dict[str, Any]:
    """Load the newest complete checkpoint, after verifying it. All workers must call this together.

    Damaged checkpoints are skipped with a warning. If the number of workers or the partitioning has changed,
    `sar.DataLoader`s restart their epoch. If the number of workers has changed, buffers that differed are worker 0's,
    and new workers get fresh random states, except for generators whose state was the same on all workers.

    If any worker fails, the state of all workers is unchanged.

    Args:
        folder: as for `save_checkpoint`, and likewise `model`, `optimizer`, `scheduler`, `embeddings` and `loaders`.
            Without `optimizer`, `scheduler` and `loaders`, only the model is loaded, for evaluation, and random states
            do not change.
        step: the step of the checkpoint to load. Default None: the newest.
        missing_ok: do not raise if the folder has no checkpoint, as on the first start. Default False.

    Returns:
        `step` and `extra` as saved; 0 and None if there was no checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint, or it does not fit the arguments.
        CommunicationError: another worker raised, or made a different call.
    """
    group, optimizers = session.current_group(), _several(optimizer)
    with group.guard():
        _check_whole("load_checkpoint", model, optimizers)
        version = newest_version(folder, step)
        if version is None:
            if missing_ok:
                return {"step": 0, "extra": None}
            raise CheckpointError(f"{folder} has no checkpoint; expected step-NUMBER, which save_checkpoint makes.")
        shared, part = {"schedulers": []} | version.read(), version.read(group.rank % version.world_size)
        saved = shared["optimizers"] or shared["schedulers"] or part["loaders"]
        alone = optimizer is None and scheduler is None and loaders is None and saved
        if alone:
            if len(part["rows"]) > 1:  # in the order of the optimizers
                raise CheckpointError(
                    f"{version.path} has several embeddings; load it with the optimizers that were saved."
                )
            log = logger.warning if group.rank == 0 else logger.debug
            log(
                "%s has %d optimizers, %d schedulers and %d loaders, which are not loaded; pass them to go on with "
                "training",
                *(version.path, len(shared["optimizers"]), len(shared["schedulers"]), len(part["loaders"])),
            )
            shared["optimizers"], shared["schedulers"], part["loaders"] = [], [], []
        table = _embeddings(model, optimizers, _several(embeddings))
        for what, there, given in (
            ("optimizers", shared["optimizers"], optimizers),
            ("schedulers", shared["schedulers"], _several(scheduler)),
            ("loaders", part["loaders"], _several(loaders)),
            ("embeddings", part["rows"], table),
        ):
            if len(there) != len(given):
                raise CheckpointError(f"The checkpoint has {len(there)} {what}, but {len(given)} are to be loaded.")
        found = [emb.rows(sparse, empty=True) for emb, sparse in table]
        for number, rows in enumerate(found):
            find_rows(version, str(number), rows)
        if version.world_size == group.world_size:
            shared["model"].update(part["buffers"])
        group.agree(f"loading {version.path.name}")
        others = [*optimizers, *_several(scheduler), *_several(loaders)]
        states = shared["optimizers"] + shared["schedulers"] + part["loaders"]
        with _unchanged_by_errors(model, others):
            try:
                if model is not None:
                    model.load_state_dict(shared["model"])
                for into, state in zip(optimizers, shared["optimizers"], strict=True):
                    for own, old in zip(into.param_groups, state["param_groups"], strict=True):
                        unknown, lacking = sorted(old.keys() - own.keys()), sorted(own.keys() - old.keys())
                        if unknown and lacking:  # another class; releases and schedulers differ in one only
                            raise ValueError(f"the saved optimizer has {unknown}, {type(into).__name__} {lacking}")
                for into, state in zip(others, states, strict=True):
                    into.load_state_dict(state)
            except CommunicationError:
                raise
            except Exception as error:  # loaders may be any objects of the user
                raise CheckpointError(
                    f"{version.path} is of another model, optimizer or loader: {type(error).__name__}: {error}"
                ) from error
            group.agree(f"{version.path.name} is loaded")
        for (emb, sparse), rows in zip(table, found, strict=True):
            emb.take_rows(rows, sparse)
        if not alone:
            _set_random_state(version, group.rank)
        return {"step": version.step, "extra": shared["extra"]}


def _check_whole(call: str, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
    """Raise `ConfigError` for a sharded model or optimizer."""
    if model is not None:
        refuse_sharded(model, call)
    if any(hasattr(optimizer, "consolidate_state_dict") for optimizer in optimizers):
        raise ConfigError(
            f"{call} got a ZeroRedundancyOptimizer, of whose state each worker has a shard. On all workers call "
            "optimizer.consolidate_state_dict(0) and save_checkpoint(..., extra=optimizer.state_dict() if sar.rank() "
            '== 0 else None) without it; then optimizer.load_state_dict(load_checkpoint(...)["extra"]).'
        )


@contextmanager
def _unchanged_by_errors(model: nn.Module | None, others: Sequence[Any]) -> Iterator[None]:
    """Restore the states of a model, optimizers and loaders after an error on any worker."""
    # Optimizers replace their tensors; loaders may do anything.
    before = [(one, one.state_dict() if isinstance(one, Optimizer) else deepcopy(one.state_dict())) for one in others]
    before += [] if model is None else [(model, copied_state(model))]
    try:
        yield
    except BaseException:
        for one, state in before:
            with suppress(Exception):  # an object that accepts no state
                one.load_state_dict(state)
        raise


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]


def _embeddings(
    model: nn.Module | None, optimizers: Sequence[Optimizer], given: Sequence[DistEmbedding]
) -> list[tuple[DistEmbedding, list[SparseOptimizer]]]:
    """All embeddings once, with the optimizers that have their state, in an order that is the same in all runs."""
    sparse = [optimizer for optimizer in optimizers if isinstance(optimizer, SparseOptimizer)]
    inside = [] if model is None else [module for module in model.modules() if isinstance(module, DistEmbedding)]
    found = dict.fromkeys([*given, *(emb for optimizer in sparse for emb in optimizer.embeddings), *inside])
    return [(emb, [optimizer for optimizer in sparse if emb in optimizer.embeddings]) for emb in found]


def _differing_buffers(group: Group, model: nn.Module | None, alike: dict[str, Any]) -> list[str]:
    """The model's buffers that differ between workers; raises if anything else differs."""
    leaves = dict(_leaves(alike))
    names = hashlib.blake2b(repr(list(leaves)).encode(), digest_size=8).hexdigest()
    group.agree(f"saving {len(leaves)} values of model and optimizers, of the names {names}")
    sums = torch.tensor([_digest(value) for value in leaves.values()], dtype=torch.int64, device="cpu")
    tables = torch.stack(group.all_gather(sums, "comparing what all workers have alike"))
    buffers = {f"model.{name}": name for name, _ in model.named_buffers()} if model is not None else {}
    differing = [name for name, differs in zip(leaves, (tables != tables[0]).any(0).tolist(), strict=True) if differs]
    for name in differing:
        if name not in buffers:
            raise CheckpointError(
                f"{name} differs between workers ({len(differing)} of {len(leaves)} values do), so it cannot be saved "
                "once for all. Call sync_params before training and gather_grads in every step; give schedulers values "
                "over all workers, as by sar.all_sum; rows of a worker's own nodes belong in DistEmbedding."
            )
    return [buffers[name] for name in differing]


def _leaves(nested: Any) -> list[tuple[str, Any]]:
    """The values in nested dictionaries and lists, each with its path."""
    paths, _ = tree_flatten_with_path(nested)
    return [(".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), x) for path, x in paths]


def _digest(value: Any) -> int:
    """A 64-bit digest of values."""
    kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    found = hashlib.blake2b(kind.encode(), digest_size=8)
    if isinstance(value, Tensor):
        found.update(as_bytes(value))
    return int.from_bytes(found.digest(), "little", signed=True)


def _random_state() -> dict[str, Any]:
    """The states of all default random generators."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  user code may draw from it
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": random.getstate(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_initialized() else {})


def _set_random_state(version: Version, rank: int) -> None:
    """Restore the random states of a worker. New workers get fresh random states, the same after every load, except for
    generators whose state was the same on all workers.
    """
    is_new = rank >= version.world_size
    states = [version.read(one)["random"] for one in (range(version.world_size) if is_new else [rank])]
    state = states[rank % len(states)]
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])
    for device, values in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(values, device)
    seed_by_name: dict[str, Callable[[int], Any]] = {
        "torch": torch.default_generator.manual_seed,
        "numpy": np.random.seed,
        "python": random.seed,
        "cuda": torch.cuda.manual_seed_all,
    }
    for name, seed in seed_by_name.items() if is_new else ():
        sums = [[_digest(value) for _, value in _leaves(one.get(name))] for one in states]
        if len(states) == 1 or any(one != sums[0] for one in sums):
            seed(_digest((sums, rank)) % 2**32)
