"""The functions of sar that something calls."""

import sys
from pathlib import Path

import sar

PACKAGE = str(Path(sar.__file__).parent) + "/"


def calls_of(run):
    """File and name of each function of sar that is called, and what is returned."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
            calls.append((frame.f_code.co_filename, name))

    sys.setprofile(note)
    try:
        returned = run()
    finally:
        sys.setprofile(None)
    return calls, returned
