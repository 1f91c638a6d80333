"""`save_checkpoint` and `load_checkpoint`: training that goes on bit for bit, on other workers too, and bad folders."""

import errno
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies
from torch import nn

import sar
from sar.comm import session
from sar.comm.group import Group
from sar.comm.process_transport import ProcessTransport
from sar.partition.graph_source import ArrayEdges, GraphSource
from tests.core.attempts import catch, catch_and_recover, require
from tests.graphs import partition_in_memory, random_graph
from tests.matrix import THREAD

NODES, DIM, BATCH = 24, 3, 3
EDGES = random_graph(0, NODES, 70)


def cut(number, num_partitions):
    """One of several partitionings; all have the same original IDs."""
    assignment = torch.randint(num_partitions, (NODES,), generator=torch.Generator().manual_seed(number))
    return partition_in_memory(EDGES, assignment, num_partitions).partitions


class Other:
    """What another package may have: a state of any kind, with a name that sar's loaders use, too."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if self.state == "refuses":
            raise TypeError("not with me")
        self.state = state


class Training:
    """Mini-batches, embeddings by node, dropout, batch normalisation, and draws of all generators."""

    def __init__(self, partition, num_workers=0):
        graph = sar.construct_full_graph(partition)
        seeds = torch.arange(*graph.node_ranges[sar.rank()])
        sampler = sar.DistNeighborSampler([2])
        self.loader = sar.DataLoader(graph, seeds, sampler, BATCH, shuffle=True, num_workers=num_workers)
        self.emb = sar.nn.DistEmbedding(graph, DIM)
        self.frozen = sar.nn.DistEmbedding(graph, DIM)
        self.model = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Dropout(), nn.Linear(4, 1))
        sar.sync_params(self.model)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.sparse = sar.nn.SparseAdam([self.emb], lr=0.1)
        self.others = [Other({"batch": 7}), Other([sar.rank(), "a list"])]
        self.numbers = []
        optimizers, loaders = [self.dense, self.sparse], [self.loader, *self.others]
        self.state = {"model": self.model, "optimizer": optimizers, "embeddings": self.frozen, "loaders": loaders}

    def run(self, steps, save_at=None, folder=None):
        """So many steps from where the loader stands."""
        done = 0
        while True:
            for blocks in self.loader:
                self.step(blocks)
                done += 1
                if done == save_at:
                    sar.save_checkpoint(folder, **self.state, step=done, extra={"numbers": list(self.numbers)})
                if done == steps:
                    return self

    def step(self, blocks):
        ids = blocks[0].srcdata["_ID"]
        # Batch normalisation wants two rows at least.
        x = torch.cat([self.emb(ids) * self.frozen(ids), torch.ones(2, DIM)])
        loss = (self.model(x) * (1 + random.random() + np.random.rand())).square().sum()  # noqa: NPY002
        self.dense.zero_grad()
        self.sparse.zero_grad()
        loss.backward()
        sar.gather_grads(self.model)
        self.dense.step()
        self.sparse.step()
        self.numbers.append(loss.item())

    def end(self):
        """All that training leads to."""
        rows = self.emb(), self.frozen(), *self.sparse.state[self.emb.weight].values()
        state = [*self.model.state_dict().values(), *rows]
        return self.numbers, [torch.as_tensor(value).detach().clone() for value in state]


def seed_all(number):
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002
    random.seed(number)


def undisturbed(partition, folder, num_workers):
    seed_all(10 + sar.rank())
    return Training(partition, num_workers).run(11, 5, folder).end()


def resumed(partition, folder, num_workers):
    seed_all(20 + sar.rank())
    training = Training(partition, num_workers)
    loaded = sar.load_checkpoint(folder, **training.state)
    if sar.rank() == 0:
        training.numbers = loaded["extra"]["numbers"]
    return loaded["step"], *training.run(11 - loaded["step"]).end()


@pytest.mark.parametrize(
    "world_size, num_workers", [(1, 0), (2, 0), pytest.param(2, 1, marks=[pytest.mark.slow, THREAD])]
)
def test_training_goes_on_bit_for_bit(pool, world_size, num_workers, tmp_path):
    """From the middle of an epoch, with buffers that differ between workers."""
    partitions = cut(1, world_size)
    expected = pool.run(undisturbed, tmp_path, num_workers, per_rank=partitions, timeout=200)
    found = pool.run(resumed, tmp_path, num_workers, per_rank=partitions, timeout=200)
    assert found[0][1] == expected[0][0]
    for (step, numbers, state), (all_numbers, expected_state) in zip(found, expected, strict=True):
        assert step == 5
        assert numbers[-6:] == all_numbers[-6:]
        assert all(map(torch.equal, state, expected_state))
    running_means = [state[4] for _, state in expected]
    assert world_size == 1 or not torch.equal(*running_means)


def drawn():
    """From every generator."""
    return {"torch": torch.rand(3).tolist(), "numpy": np.random.rand(3).tolist(), "python": random.random()}  # noqa: NPY002


def save_by_two(mine, folder):
    """By the first two of three workers, which make a group of their own; `mine` may be a directory to load from."""
    if sar.rank() == 2:
        return None
    store = dist.PrefixStore(str(folder), dist.distributed_c10d._get_default_store())
    group = Group(ProcessTransport(store, sar.rank(), 2))
    with session.standing_in(group):
        mine = sar.load_dgl_partition_data(mine, sar.rank(), "cpu") if isinstance(mine, str) else mine
        seed_all(10 + sar.rank())
        training = Training(mine).run(3)
        random.seed(5)  # alike on both
        sar.save_checkpoint(folder, **training.state, step=3)
        return mine.node_features["orig_id"], training.emb().detach(), training.sparse.state[training.emb.weight]


def load_by_three(partition, folder):
    if isinstance(partition, str):
        partition = sar.load_dgl_partition_data(partition, sar.rank(), "cpu")
    training = Training(partition)
    attempt = catch_and_recover(lambda: sar.load_checkpoint(folder, model=training.model, embeddings=training.frozen))
    assert "several embeddings" in require(attempt).message
    assert sar.load_checkpoint(folder, **training.state) == {"step": 3, "extra": None}
    state = {name: torch.as_tensor(value).clone() for name, value in training.sparse.state[training.emb.weight].items()}
    found = partition.node_features["orig_id"], training.emb().detach().clone(), state
    assert [other.state for other in training.others] == [{"batch": 7}, [sar.rank() % 2, "a list"]]
    numbers = drawn()
    sar.load_checkpoint(folder, **training.state)
    assert drawn() == numbers
    training.run(len(training.loader))
    return found, numbers


def written(folder, num_parts):
    """A directory of so many parts, by any of several workers."""
    graph = GraphSource({"_N": NODES}, {("_N", "_E", "_N"): ArrayEdges(EDGES.src.numpy(), EDGES.dst.numpy())}, {}, {})
    part_of = np.random.default_rng(num_parts).integers(0, num_parts, NODES)
    return str(sar.write_partitions(graph, part_of, num_parts, folder, "graph", method="custom").json_file)


@pytest.mark.processes("two of the processes form a group of their own")
@pytest.mark.parametrize("in_files", [False, True], ids=["2 parts, then 3", "4 parts on 2 workers, then 3 on 3"])
@pytest.mark.parametrize("world_size", [3])
def test_other_workers_and_another_partitioning(pool, in_files, tmp_path):
    first = [written(tmp_path / "four", 4)] * 2 if in_files else cut(1, 2)
    then = [written(tmp_path / "three", 3)] * 3 if in_files else cut(2, 3)
    saved = pool.run(save_by_two, tmp_path / "saved", per_rank=[*first, None])[:2]
    loaded, numbers = zip(*pool.run(load_by_three, tmp_path / "saved", per_rank=then), strict=True)
    for name, distinct in (("torch", 3), ("numpy", 3), ("python", 1)):
        assert len({str(of_one[name]) for of_one in numbers}) == distinct, name
    for field in ("exp_avg", "exp_avg_sq", None):
        rows = []
        for pieces in (saved, loaded):
            ids = torch.cat([ids for ids, *_ in pieces])
            values = torch.cat([state[field] if field else weight for _, weight, state in pieces])
            rows.append(values[ids.argsort()])
        assert torch.equal(*rows)
    assert [int(state["step"]) for *_, state in loaded] == [3] * 3


def load_other_rows(partition, folder):
    """Rows of embeddings that are wider, and of nodes by other IDs; the state of another optimizer."""
    graph = sar.construct_full_graph(partition)

    def made(width=DIM, kind=sar.nn.SparseAdam):
        emb = sar.nn.DistEmbedding(graph, width)
        return emb, {"embeddings": emb, "optimizer": kind([emb])}

    sar.save_checkpoint(folder, **made()[1])
    wider, other = made(width=DIM + 1), made(kind=sar.nn.SparseAdagrad)
    unknown, unnamed = made(), made()
    unknown[0].original_ids = unknown[0].original_ids + NODES
    unnamed[0].original_ids = None
    found = []
    for emb, given in (wider, other, unknown, unnamed):
        before = emb().detach().clone()
        found.append(require(catch_and_recover(partial(sar.load_checkpoint, folder, **given))).message)
        assert torch.equal(emb(), before)
    return found


@pytest.mark.parametrize("world_size", [2])
def test_rows_of_other_embeddings(pool, tmp_path):
    for failures in pool.run(load_other_rows, tmp_path, per_rank=cut(1, 2)):
        words = ["expected", "one of the same kind", "are not in", "Global IDs serve for one partitioning only"]
        assert all(word in message for word, message in zip(words, failures, strict=True)), failures


def leave_loops(partitions, folder):
    """The batches that a loader gives which goes on where another stood, and those that this one has not given yet."""

    def make(partition=partitions[0]):
        graph = sar.construct_full_graph(partition)
        seeds, sampler = torch.arange(*graph.node_ranges[sar.rank()]), sar.DistNeighborSampler([2])
        return sar.DataLoader(graph, seeds, sampler, BATCH, shuffle=True, seed=1)

    def batches(of):
        return [blocks[-1].dstdata["_ID"].tolist() for blocks in of]

    def rest():
        other = make()
        other.load_state_dict(loader.state_dict())
        return batches(other)

    loader = make()
    epochs = [batches(loader) for _ in range(4)]
    loader, loaded = make(), make()
    batches(itertools.islice(loader, 2))
    sar.save_checkpoint(folder, loaders=loader)
    sar.load_checkpoint(folder, loaders=loaded)
    found = [(batches(loaded), epochs[0][2:])]
    iterator = iter(loader)  # of the next epoch, as ever
    found.append((rest(), epochs[1]))
    found.append((batches(itertools.islice(iterator, 1)), epochs[1][:1]))
    found.append((rest(), epochs[1][1:]))
    for _ in zip(range(len(loader)), loader, strict=False):  # to the last batch, but not to the end of the loop
        pass
    found.append((rest(), epochs[3]))
    elsewhere = make(partitions[1])
    elsewhere.load_state_dict(make().state_dict() | {"batch": 1})
    return [*found, (elsewhere.state_dict()["batch"], 0)], len(epochs[0])


@pytest.mark.parametrize("world_size", [2])
def test_a_loop_that_was_left_goes_on(pool, world_size, tmp_path):
    partitions = list(zip(cut(1, world_size), cut(2, world_size), strict=True))
    for found, batches in pool.run(leave_loops, tmp_path, per_rank=partitions):
        assert all(rest == expected for rest, expected in found), found
        assert batches > 2


class Simple:
    """A model without a graph, whose state says which step it is of."""

    def __init__(self, step=0):
        self.model = nn.Linear(40, 40)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        nn.init.constant_(self.model.weight, step)

    def save(self, folder, step, **options):
        nn.init.constant_(self.model.weight, step)
        sar.save_checkpoint(folder, model=self.model, optimizer=self.optimizer, step=step, **options)

    def load(self, folder, **options):
        """The step of what was loaded, once it is sure that all of it is of this step."""
        loaded = sar.load_checkpoint(folder, model=self.model, optimizer=self.optimizer, **options)
        assert torch.equal(self.model.weight, torch.full((40, 40), float(loaded["step"])))
        return loaded["step"]


def names_in(folder):
    """All but `latest`, which names one of them."""
    names = sorted(path.name for path in folder.iterdir())
    if "latest" in names:
        names.remove("latest")
        assert (folder / "latest").read_text().strip() in names
    return names


@contextmanager
def told():
    """The warnings of this worker."""
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    sar.logger.addHandler(handler)
    yield lines
    sar.logger.removeHandler(handler)


def damaged(folder, name):
    simple = Simple()
    simple.save(folder, 1)
    simple.save(folder, 2)
    sar.all_sum(1)
    if sar.rank() == 0:
        (folder / "step-000002" / name).write_bytes(b"")
    sar.all_sum(1)
    with told() as lines:
        assert simple.load(folder) == 1
    return lines


@pytest.mark.parametrize("name, rank", [("manifest.json", 0), ("shared.pt", 0), ("worker-0.pt", 1)])
@pytest.mark.parametrize("world_size", [2])
def test_damage_is_told_by_one_worker(pool, tmp_path, name, rank):
    told = pool.run(damaged, tmp_path / "x", name)
    assert [len(lines) for lines in told] == [int(worker == rank) for worker in range(2)], told


def keep_and_choose(folder):
    simple, stop = Simple(), sar.EarlyStopping()
    first = sar.load_checkpoint(folder / "none", model=simple.model, missing_ok=True)
    for step in (1, 2, 3, 2):
        simple.save(folder, step, keep=3, loaders=stop)
    kept = names_in(folder)
    sar.comm.all_reduce(torch.zeros(1))  # or the next save would be seen
    loaded = simple.load(folder, loaders=stop), simple.load(folder, step=3, loaders=stop)
    said, random_state = (folder / "latest").read_text(), torch.get_rng_state()
    with told() as lines:
        alone = sar.load_checkpoint(folder, model=simple.model)["step"], bool((simple.model.weight == 2).all())
    assert len(lines) == (sar.rank() == 0), lines
    assert torch.equal(torch.get_rng_state(), random_state)  # a model that is loaded alone is to be evaluated
    simple.save(folder, 4, keep=1)
    return first, kept, loaded, said, alone, names_in(folder)


@pytest.mark.parametrize("world_size", [2])
def test_the_checkpoints_saved_last_are_kept(pool, tmp_path):
    kept = ["step-000002", "step-000002.1", "step-000003"]
    expected = {"step": 0, "extra": None}, kept, (2, 3), "step-000002.1\n", (2, True), ["step-000004"]
    assert pool.run(keep_and_choose, tmp_path) == [expected] * 2


LR = torch.optim.lr_scheduler
SCHEDULERS = [
    lambda optimizer: LR.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    lambda optimizer: LR.ReduceLROnPlateau(optimizer, patience=0),
    lambda optimizer: LR.SequentialLR(optimizer, [LR.LinearLR(optimizer), LR.ExponentialLR(optimizer, 0.9)], [3]),
]


def schedule(folder):
    """For each scheduler the rates of steps without a break, and of those after saving and loading."""

    def rates(steps, optimizer, scheduler):
        for step in steps:
            optimizer.step()
            scheduler.step(*([step] if isinstance(scheduler, LR.ReduceLROnPlateau) else []))
            yield optimizer.param_groups[0]["lr"]

    def made(make):
        optimizer = Simple().optimizer
        return {"optimizer": optimizer, "scheduler": make(optimizer)}

    found = []
    for number, make in enumerate(SCHEDULERS):
        state, other = made(make), made(make)
        list(rates(range(4), **state))
        sar.save_checkpoint(folder / str(number), **state)
        sar.load_checkpoint(folder / str(number), **other)
        found.append([list(rates(range(4, 8), **one)) for one in (state, other)])
    state = made(SCHEDULERS[-2])
    state["scheduler"].step(sar.rank())  # its own value
    return found, require(catch_and_recover(lambda: sar.save_checkpoint(folder / "x", scheduler=state["scheduler"])))


@pytest.mark.parametrize("world_size", [2])
def test_schedulers_go_on(pool, tmp_path):
    for found, differs in pool.run(schedule, tmp_path):
        for expected, rates in found:
            assert rates == expected
            assert len(set(rates)) > 1
        assert "schedulers.0.best differs" in differs.message


def load_some(folder):
    """Worker 1 cannot load all; what there is afterwards, and what there was before."""
    seed_all(sar.rank())
    simple, stop = Simple(), sar.EarlyStopping()
    sar.sync_params(simple.model)
    simple.model(torch.ones(40)).sum().backward()
    simple.optimizer.step()
    stop.step(1.0, simple.model)
    others = [stop, Other({"batch": 1})]
    simple.save(folder, 2, loaders=others)
    nn.init.constant_(simple.model.weight, 5)
    simple.optimizer.state[simple.model.weight]["momentum_buffer"].fill_(6)
    stop.best, others[1].state = 7.0, "refuses" if sar.rank() == 1 else "takes all"
    random_state = torch.get_rng_state()
    failure = require(catch_and_recover(lambda: simple.load(folder, loaders=others)))
    kept = [
        bool((simple.model.weight == 5).all()),
        bool((simple.optimizer.state[simple.model.weight]["momentum_buffer"] == 6).all()),
        stop.best == 7,
        others[1].state == ("refuses" if sar.rank() == 1 else "takes all"),
        torch.equal(torch.get_rng_state(), random_state),
    ]
    return failure, kept


@pytest.mark.parametrize("world_size", [2])
def test_all_is_loaded_or_nothing(pool, tmp_path):
    for rank, (failure, kept) in enumerate(pool.run(load_some, tmp_path)):
        assert failure.kind == ("CheckpointError" if rank == 1 else "PeerError")
        assert "another model, optimizer or loader: TypeError: not with me" in failure.message
        assert kept == [True] * 5


class Countdown:
    """Calls `act` at the n-th operation on files in a folder: those that the interpreter tells of, and syncs."""

    def __init__(self, number, folder, act):
        self.left, self.folder, self.act = number, str(folder), act

    def count(self):
        self.left -= 1
        if self.left == 0:
            self.act()

    def hear(self, event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and self.folder in str(args[0]):
            self.count()

    def install(self):
        fsync = os.fsync
        os.fsync = lambda descriptor: (self.count(), fsync(descriptor))
        sys.addaudithook(self.hear)

        def restore():
            os.fsync, self.left = fsync, 0

        return restore


def kill_at_every_operation(folder):
    """In a process each: save step 2 over step 1 and be killed at the n-th operation; what is there then."""
    found = []
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        simple = Simple()
        simple.save(folder, 1, keep=1)
        child = os.fork()
        if child == 0:
            Countdown(number, folder, lambda: os.kill(os.getpid(), signal.SIGKILL)).install()
            simple.save(folder, 2, keep=1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(simple.load(folder))
        names_in(folder)
        simple.save(folder, 3, keep=1)
        assert names_in(folder) == ["step-000003"]
        if status == 0:
            return found
        assert status == -signal.SIGKILL


@pytest.mark.parametrize("world_size", [1])
def test_a_kill_at_any_operation_leaves_a_whole_checkpoint(pool, tmp_path):
    [found] = pool.run(kill_at_every_operation, tmp_path / "x")
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 2
    assert found.count(1) > 10
    assert found.count(2) > 4  # while the old one is being removed


def killed(folder, victim, number):
    """Save step 2 over step 1, in which a worker is killed at the n-th operation."""
    simple = Simple()
    simple.save(folder, 1)
    if sar.rank() == victim:
        Countdown(number, folder, lambda: os.kill(os.getpid(), signal.SIGKILL)).install()
    began = time.monotonic()
    failure = catch(lambda: simple.save(folder, 2))
    return require(failure), time.monotonic() - began


def load_simple(folder):
    return Simple().load(folder)


@pytest.mark.processes("of a killed process")
@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("victim, number", [(1, 3), pytest.param(0, 3, marks=pytest.mark.slow)])
def test_a_worker_that_dies_while_saving(pool, world_size, victim, number, tmp_path):
    outcomes = pool.outcomes(killed, tmp_path, victim, number)
    assert outcomes[victim].kind == "Died"
    failure, seconds = outcomes[1 - victim].value
    assert failure.kind == "PeerError"
    assert seconds < 60
    assert pool.run(load_simple, tmp_path) == [1, 1]
    assert victim == 0 or names_in(tmp_path) == ["step-000001"]


def no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full(folder, rank):
    """Save where one worker has no room."""
    simple = Simple()
    simple.save(folder, 1)
    restore = Countdown(3, folder, no_room).install() if sar.rank() == rank else lambda: None
    failure = catch(lambda: simple.save(folder, 2))
    restore()
    sar.recover()
    return require(failure), simple.load(folder)


@pytest.mark.processes("counts the operations of a process")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("world_size", [2])
def test_a_full_disk_is_an_error_on_all_workers(pool, tmp_path, rank):
    for other, (failure, left) in enumerate(pool.run(full, tmp_path / "x", rank)):
        assert failure.kind == ("CheckpointError" if other == rank else "PeerError")
        assert "Nothing was saved" in failure.message
        assert "No space left on device" in failure.message
        assert left == 1
    assert names_in(tmp_path / "x") == ["step-000001"]


def load_damaged(folder, damages):
    """For every damage the step that is loaded, or what is raised."""
    simple, found = Simple(), []
    for name, position, flip in damages:
        shutil.rmtree(folder, ignore_errors=True)
        simple.save(folder, 1)
        simple.save(folder, 2)
        file = folder / "step-000002" / name
        data = bytearray(file.read_bytes())
        place = int(position * len(data))
        if flip:
            data[place] ^= flip
        else:
            del data[place:]
        file.write_bytes(data)
        found.append(simple.load(folder))
        shutil.rmtree(folder / "step-000001")
        failure = catch(lambda: simple.load(folder))
        found.append(2 if failure is None else failure.kind)
    return found


@pytest.mark.parametrize("world_size", [1])
@hypothesis.given(
    strategies.lists(
        strategies.tuples(
            strategies.sampled_from(["manifest.json", "shared.pt", "worker-0.pt"]),
            strategies.floats(0, 1, exclude_max=True),
            strategies.integers(0, 255),
        ),
        min_size=20,
        max_size=20,
    )
)
@hypothesis.settings(max_examples=3)
def test_damage_is_found_and_the_earlier_checkpoint_taken(pool, tmp_path, damages):
    [found] = pool.run(load_damaged, tmp_path / "x", damages)
    for (name, _, _), first, alone in zip(damages, found[::2], found[1::2], strict=True):
        # In the manifest are bytes without meaning; all of step 2 was loaded then.
        assert (first, alone) == (1, "CheckpointError") or (name == "manifest.json" and (first, alone) == (2, 2))


class Unsafe:
    pass


def refuse(folder):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias += sar.rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sar.sync_params(model)
    sar.save_checkpoint(folder, model=model, optimizer=optimizer)
    with torch.no_grad():
        model.bias += sar.rank()
    adam = torch.optim.Adam(model.parameters())
    attempts = {
        "model.bias differs": lambda: sar.save_checkpoint(folder, model=model),
        "Unsafe": lambda: sar.save_checkpoint(folder, extra=Unsafe()),
        "Expected tensors": lambda: sar.save_checkpoint(folder, extra=lambda: None),
        "keep 0": lambda: sar.save_checkpoint(folder, keep=0),
        "another model": lambda: sar.load_checkpoint(folder, model=nn.Linear(2, 3), optimizer=optimizer),
        "the saved optimizer has": lambda: sar.load_checkpoint(folder, model=model, optimizer=adam),
        "1 optimizers, but 0": lambda: sar.load_checkpoint(folder, model=model, loaders=[]),
        "no checkpoint": lambda: sar.load_checkpoint(folder / "none", model=model),
        "step 7": lambda: sar.load_checkpoint(folder, model=model, step=7),
    }
    return [(words, require(catch_and_recover(attempt))) for words, attempt in attempts.items()]


@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_saved_or_loaded(pool, tmp_path):
    for failures in pool.run(refuse, tmp_path):
        for words, failure in failures:
            assert "SarError" in failure.bases
            assert words in failure.message
    assert names_in(tmp_path) == ["step-000000"]
