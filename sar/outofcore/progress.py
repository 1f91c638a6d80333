"""Shows the progress of workers in a process: lines until the first gradients are summed, or a bar on a terminal."""

import re
import sys
import time

from sar.comm.statistics import BACKWARD
from sar.host.ranges import running_module

LINE_SECONDS, BAR_SECONDS = 5.0, 0.1
"""Seconds between two lines, and two states of the bar."""
_CLEAR = "\r\x1b[K"  # the terminal's line


class Progress:
    """Counts the workers that have continued after the latest meeting. Silent if not `shown`."""

    def __init__(self, size: int, *, shown: bool) -> None:
        self._size, self._shown, self._bar = size, shown, sys.stderr.isatty()
        self._meeting = self._count = 0
        self._call, self._doing, self._module = "", "loading", ""
        self._modules: dict[int, str] = {}  # modules of calls in the forward, by number of the call, for the backward
        self._told_at = time.monotonic()

    def goes_on(self, meeting: int, call: str = "", number: int = 0, step: str = "") -> None:
        """Called when a worker begins, or continues after a meeting of a call with this number."""
        if not self._shown:
            return
        if meeting != self._meeting:
            self._meeting, self._count = meeting, 0
            self._doing = self._describe(call, number, step)
        self._count += 1
        # The script may print its results after other calls, such as `all_sum`: the bar is not in its way then.
        lasting = re.search("forward|backward|^loading$|^structure$|^gather_grads$", self._doing)
        now = time.monotonic()
        if self._bar and not lasting:
            self.clear()
        elif now >= self._told_at + (BAR_SECONDS if self._bar else LINE_SECONDS):
            self._told_at = now
            text = f"sar: {self._doing}: {self._count} of {self._size}"
            bar = "#" * (20 * self._count // self._size)
            print(f"{_CLEAR}{text} |{bar:20}|" if self._bar else text, end="" if self._bar else "\n", file=sys.stderr)
            sys.stderr.flush()

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar and self._shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def _describe(self, call: str, number: int, step: str) -> str:
        before, self._call = self._call, call
        if call.startswith(BACKWARD):
            if call != before:
                self._module = self._modules.pop(int(call.rpartition(" ")[2]), "")
            return f"{self._module} backward{step}".strip()
        name, kind = running_module()
        if kind:
            self._modules.setdefault(number, name or kind)
            return f"{name or kind} forward{step}"
        if call.startswith("gather_grads"):
            self._modules.clear()
            self._shown = self._bar
        if not call or call.startswith("exchange_tensors"):  # a part of another call
            return self._doing
        words = re.split("[:,;(]| of | with ", call)[0]
        return "structure" if words == "constructing the graph" else words[:60]
