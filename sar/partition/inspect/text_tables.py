"""Tables of words and numbers."""

from collections.abc import Sequence


def as_text(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """An aligned table for the terminal, its header first; the first `left` columns are words, the others numbers."""
    lines = [_aligned(row, rows, "  ", left) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in _widths(rows)))
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """The same table in Markdown, with two columns of words."""
    rule = "|".join("-" * (width + 1) + (":" if column > 1 else "-") for column, width in enumerate(_widths(rows)))
    lines = [f"| {_aligned(row, rows, ' | ', 2)} |" for row in rows]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]


def _aligned(row: Sequence[str], rows: Sequence[Sequence[str]], separator: str, left: int) -> str:
    cells = enumerate(zip(row, _widths(rows), strict=True))
    return separator.join(cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in cells)
