"""The rest of an agreed call in a thread of its own, beside the thread that computes what does not depend on it."""

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from sar.comm.store_notes import Abandonable

T = TypeVar("T")


class Beside(Abandonable[T]):
    """Runs `rest` without gradients, and tells `failed` of an error; all waits inside are bounded."""

    def __init__(self, rest: Callable[[], T], failed: Callable[[BaseException], None]) -> None:
        self.mostly_waits = threading.Event()
        self.blocks_since = 0.0  # since when the thread that computes has waited for this one
        self._failed = failed
        self._inference = torch.is_inference_mode_enabled()
        super().__init__(rest, "sar-call")

    def run(self) -> None:
        with torch.inference_mode(self._inference), torch.no_grad():
            super().run()
        if self._error is not None:
            self._failed(self._error)
        self.mostly_waits.set()

    def wait_for_waiting(self) -> None:
        """Until what is left is mostly to wait, or nothing is."""
        self.mostly_waits.wait()
        self.blocks_since = math.inf

    def wait(self) -> None:
        """Until it has ended."""
        self.blocks_since = time.perf_counter()
        self.join()


def mostly_waits() -> None:
    """Say, inside a call, that what is left of it is mostly to wait."""
    thread = threading.current_thread()
    if isinstance(thread, Beside):
        thread.mostly_waits.set()


def blocked_since(start: float) -> float:
    """Since when the thread that computes is blocked, where this one has waited since `start`."""
    thread = threading.current_thread()
    return max(start, thread.blocks_since) if isinstance(thread, Beside) else start
