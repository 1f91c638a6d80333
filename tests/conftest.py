"""Set-up shared by all tests: hypothesis profile, workers, order of tests, and a check for leftovers."""

import inspect
import time
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch

import sar  # noqa: F401  before anything imports dgl
from sar.adapters.dgl.shim import has_dgl
from sar.host.cuda import why_no_cuda
from tests import durations, filled_memory, leftovers
from tests.gpu.places import Place
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import WorkerPool, close_shared_pools, end_helper_processes, shared_pool

# Random examples for each test: of `make test-all`, `make test` and `make test-fast`.
for name, examples in (("all", 100), ("sar", 20), ("fast", 10)):
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        # An example may train on four workers: one that fails is reported as it was drawn, not shrunk for minutes.
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
    )
filled_memory.install(everywhere=True)
hypothesis.settings.load_profile("sar")  # `--hypothesis-profile` chooses another


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-workers", type=int, metavar="W", help="leave out tests that need more workers")
    parser.addoption("--processes", action="store_true", help="every worker is a process, more than two of a test, too")
    told = "workers are virtual: those of a test share W processes; with xV: tests of any number of workers have W x V"
    parser.addoption("--virtual", type=_shape, metavar="W[xV]", help=told)
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.txt anew")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # workers and other processes have the other cores, which idle threads would keep busy
    if config.getoption("--record-durations"):
        config.pluginmanager.register(durations.Recorder())


def _shape(text: str) -> tuple[int, int | None]:
    processes, _, each = text.partition("x")
    return int(processes), int(each) if each else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With `--virtual WxV`, let tests that take any number of workers, or try several, have W x V."""
    processes, each = metafunc.config.getoption("--virtual") or (None, None)
    if processes is None or each is None:
        return
    takes_any = "world_size" in inspect.signature(metafunc.function).parameters
    marks = metafunc.definition.own_markers
    for i, mark in enumerate(marks):
        if mark.name != "parametrize" or mark.args[0] != "world_size" or mark.args[1] == [1]:
            continue
        if takes_any or len(mark.args[1]) > 1:
            marks[i] = pytest.mark.parametrize("world_size", [processes * each]).mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for, skip what lacks a GPU; where processes share a queue, the longest file first."""
    differing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if differing:  # the processes of pytest-xdist would collect different tests
        raise pytest.UsageError(f"Names of tests contain an address: {differing[0]}")
    most, shape = config.getoption("--most-workers"), config.getoption("--virtual")
    kept = [item for item in items if most is None or _workers(item) <= most]
    kept = [item for item in kept if shape is None or _is_virtual(item, *shape)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    for item in items:
        if (needed := item.get_closest_marker("gpu")) is not None and (why := why_no_cuda(**needed.kwargs)) is not None:
            item.add_marker(pytest.mark.skip(reason=why))
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        durations.longest_files_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _skipped_without_dgl((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return _skipped_without_dgl((yield))


def _skipped_without_dgl(report: Any) -> Any:
    """Skip what fails as DGL is not installed, such as on Python 3.13, but for tests of PyTorch Geometric."""
    if (
        report.failed
        and "No module named 'dgl'" in report.longreprtext
        and "pyg" not in report.nodeid.partition("[")[0]
        and not has_dgl()
    ):
        report.outcome, report.longrepr = "skipped", (report.nodeid.partition("::")[0], 0, "Skipped: needs DGL")
    return report


def _is_virtual(item: pytest.Item, processes: int, each: int | None) -> bool:
    """Whether a test has as many workers as asked for, and they can be virtual."""
    workers = _workers(item)
    shared = workers == processes * each if each else workers > processes and workers % processes == 0
    return shared and "pool" in getattr(item, "fixturenames", ()) and item.get_closest_marker("processes") is None


def _workers(item: pytest.Item) -> int:
    workers: int = item.callspec.params.get("world_size", 0) if hasattr(item, "callspec") else 0
    return workers


@pytest.fixture
def pool(world_size: int, request: pytest.FixtureRequest) -> WorkerPool | VirtualPool:
    """`world_size` workers; the test is parametrised with `world_size`.

    One or two are processes, and more are workers of one process, which is quicker; but tests that are about processes
    have these, and with `--processes` all.
    """
    shape: tuple[int, int | None] | None = request.config.getoption("--virtual")
    if shape is not None:
        return VirtualPool(shape[0], world_size // shape[0])
    processes = request.config.getoption("--processes") or request.node.get_closest_marker("processes")
    return shared_pool(world_size) if world_size <= 2 or processes else VirtualPool(1, world_size, spill=False)


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Workers on a GPU, real or pretended; the test is parametrised with `PLACES`, indirectly."""
    there: Place = request.param
    there.pool = WorkerPool(there.world_size, there.backend)  # not shared: the pretend device stays in a process
    yield there
    there.pool.close()


def _left(shared_memory: set[str]) -> list[str]:
    return leftovers.marked_processes() + leftovers.abandoned_shared_memory(shared_memory)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After the last test no process, shared memory or directory of ours is left."""
    leftovers.mark_session()
    shared_memory = leftovers.shared_memory()
    yield
    close_shared_pools()
    end_helper_processes()
    # Processes take a moment to end, and entries that another session uses may go while they are looked at.
    deadline = time.monotonic() + 5
    while _left(shared_memory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _left(shared_memory) == []
    assert leftovers.pool_directories() == set()
