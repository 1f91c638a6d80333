"""Values that are set temporarily in one thread.

Workers of one process are threads that pass turns in distributed calls ([Note: workers of one process]). If a global
were set during such a call and restored afterwards, other threads would see it, and restore it in another order.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """A separate value for each thread. Unlike a `ContextVar`, `torch.compile` can trace it."""

    def __init__(self, value: T) -> None:
        self.value = value  # threading.local calls this in every thread

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Context with another value."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
