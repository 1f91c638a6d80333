"""Set-up shared by all tests: hypothesis profile, worker pool, order of tests, and a check for leftovers."""

import time
from collections.abc import Iterator

import hypothesis
import pytest

import sar  # noqa: F401  before anything imports dgl
from tests import leftovers
from tests.virtual.virtual_pool import VirtualPool
from tests.workers import WorkerPool, close_shared_pool, end_helper_processes, shared_pool

# Random examples for each test: of `make test-all`, `make test` and `make test-fast`.
for name, examples in (("all", 100), ("sar", 50), ("fast", 20)):
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
hypothesis.settings.load_profile("sar")  # `--hypothesis-profile` chooses another


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-workers", type=int, metavar="W", help="leave out tests that need more workers")
    parser.addoption("--virtual", type=int, metavar="W", help="workers are virtual: those of a test share W processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by number of workers, so that one pool after the other is needed, each started once."""
    most = config.getoption("--most-workers")
    if most is not None:
        config.hook.pytest_deselected(items=[item for item in items if _workers(item) > most])
        items[:] = [item for item in items if _workers(item) <= most]
    items.sort(key=_workers)


def _workers(item: pytest.Item) -> int:
    workers: int = item.callspec.params.get("world_size", 0) if hasattr(item, "callspec") else 0
    return workers


@pytest.fixture
def pool(world_size: int, request: pytest.FixtureRequest) -> WorkerPool | VirtualPool:
    """`world_size` workers; the test is parametrised with `world_size`."""
    processes: int | None = request.config.getoption("--virtual")
    if processes is None:
        return shared_pool(world_size)
    if world_size == processes or world_size % processes:
        pytest.skip(f"{world_size} workers are no virtual workers of {processes} processes")
    return VirtualPool(processes, world_size // processes)


def _left(shared_memory: set[str]) -> list[str]:
    return leftovers.marked_processes() + leftovers.abandoned_shared_memory(shared_memory)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After the last test no process, shared memory or directory of ours is left."""
    leftovers.mark_session()
    shared_memory = leftovers.shared_memory()
    yield
    close_shared_pool()
    end_helper_processes()
    # Processes take a moment to end, and entries that another session uses may go while they are looked at.
    deadline = time.monotonic() + 5
    while _left(shared_memory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _left(shared_memory) == []
    assert leftovers.pool_directories() == set()
