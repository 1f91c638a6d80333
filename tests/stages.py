"""Lines in which a command without a terminal tells of its stages."""

import re

_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} sar INFO (.*)\n", re.MULTILINE)


def stages_in(said: str) -> list[str]:
    """The stages, in order."""
    return _LINE.findall(said)


def without_stages(said: str) -> str:
    """What else was said."""
    return _LINE.sub("", said)
