"""Values that hold while something runs, in the thread that runs it.

Workers of one process are threads that pass turns in distributed calls ([Note: workers of one process]). A global that
is set around such a call, and set back after it, would be seen by the others meanwhile, and be set back in another
order than set.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """A value that each thread has for itself; `torch.compile` follows it, as it does not a `ContextVar`."""

    def __init__(self, value: T) -> None:
        self.value = value  # threading.local calls this in every thread

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Give it another value inside."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
