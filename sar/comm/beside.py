"""The rest of an agreed call in a thread of its own, beside the thread that computes what does not depend on it."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from sar.comm.statistics import counters
from sar.comm.store_notes import Abandonable

T = TypeVar("T")


class Beside(Abandonable[T]):
    """Runs `rest` without gradients, and tells `failed` of an error; all waits inside are bounded."""

    def __init__(self, rest: Callable[[], T], failed: Callable[[BaseException], None]) -> None:
        self.mostly_waits = threading.Event()  # set once that is what is left
        self._failed = failed
        self._inference = torch.is_inference_mode_enabled()
        super().__init__(rest, "sar-call")

    def run(self) -> None:
        with torch.inference_mode(self._inference), torch.no_grad():
            super().run()
        if self._error is not None:
            self._failed(self._error)
        self.mostly_waits.set()

    def wait(self) -> None:
        """Wait for its end; counts as waiting, as what this thread waits for itself does not."""
        start = time.perf_counter()
        self.join()
        counters.seconds_waited += time.perf_counter() - start


def current() -> Beside[object] | None:
    """This thread, if it is beside the one that computes."""
    thread = threading.current_thread()
    return thread if isinstance(thread, Beside) else None
