"""Records SIGTERM and SIGUSR1, with which schedulers announce the end of a job, instead of ending the process."""

import ctypes
import os
import signal
import threading
from functools import partial
from typing import Any, Final

ENDING: Final = (signal.SIGTERM, signal.SIGUSR1)

_set_handler: Final = signal.signal  # workers that share a process replace it
_noted: Final[list[int]] = []
_usual: Final[dict[int, Any]] = {}  # handlers before `note_signals`, by signal


def signal_noted() -> bool:
    """Whether one of the signals has arrived since `note_signals`."""
    return bool(_noted)


def note_signals() -> None:
    """From now on, record the signals `ENDING` for `signal_noted`. May be called from any thread."""
    if _usual:
        return
    if threading.current_thread() is threading.main_thread():
        _replace_handlers()
    else:  # Python sets handlers only in its main thread, which runs this between two bytecodes
        ctypes.pythonapi.Py_AddPendingCall(_replacing, None)


def _replace_handlers(_: Any = None) -> int:
    for number in ENDING:
        _usual.setdefault(number, _set_handler(number, partial(_note, os.getpid())))
    return 0


def _note(process: int, number: int, _: object) -> None:
    if os.getpid() == process:
        _noted.append(number)
    else:  # a forked process, such as a loader's worker that its parent terminates, ends as usual
        _set_handler(number, _usual[number] or signal.SIG_DFL)
        os.kill(os.getpid(), number)


_replacing: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_replace_handlers)
