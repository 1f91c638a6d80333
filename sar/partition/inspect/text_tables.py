"""Tables of words and numbers."""

from collections.abc import Sequence


def as_text(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """An aligned table for the terminal, header first. The first `left` columns are text, the rest numbers."""
    header, *others = _aligned(rows, left)
    return "\n".join("  ".join(row).rstrip() for row in (header, ["-" * len(cell) for cell in header], *others))


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """The same table in Markdown, with two columns of words."""
    cells = _aligned(rows, 2)
    rule = "|".join("-" * (len(cell) + 1) + (":" if column > 1 else "-") for column, cell in enumerate(cells[0]))
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if column < left else ">" for column in range(len(widths))]
    return [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows]


def mega(count: float) -> str:
    """Millions of bytes, as text."""
    return f"{count / 1e6:,.1f}"


def of_limit(memory: int) -> str:
    """A limit in MB, as in the tables, and in powers of 1024 if it is a multiple."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if memory % size == 0:
            return f"{memory // size} {unit} ({mega(memory)} MB)"
    return f"{mega(memory)} MB"
