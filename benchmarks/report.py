"""Writes the generated parts of the pages: tables and their settings.

They are also in docs/figures.json, with which tests compare the figures in sentences, README and pictures.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sar.partition.inspect.text_tables import as_markdown, as_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
MEGA = 1e6


def setting(command: str, options: Mapping[str, str]) -> str:
    """The settings of a table in two lines: the command, and the rest. Versions are only printed."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("dgl", "numba", "numpy") if find_spec(name))
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{python}, {packages}, {' '.join(platform.libc_ver())}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB memory"
    others = [*(f"{key}: {value}" for key, value in options.items()), machine, date.today().isoformat()]
    return f"- command: {command}\n- {'; '.join(others)}"


def publish(page: Path, section: str, conditions: str, rows: Sequence[tuple[str, ...]], picture: str = "") -> None:
    """Print a table, and write it into a section of a page, after its settings and before its picture."""
    print(f"\n{as_text(rows)}")
    write_section(page, section, "\n\n".join(part for part in (conditions, as_markdown(rows), picture) if part))


def write_section(page: Path, name: str, text: str) -> None:
    """Write the generated part `name` of a page, and its figures to figures.json beside it."""
    replace_section(page, name, f"\n{text}\n")
    figures = page.with_name("figures.json")
    sections = json.loads(figures.read_text()) if figures.exists() else {}
    sections[name] = {"page": page.name, **figures_of(text)}
    figures.write_text(json.dumps(dict(sorted(sections.items())), indent=1, ensure_ascii=False) + "\n")


def replace_section(page: Path, name: str, text: str) -> None:
    """Replace the generated part `name` of a page, or append it."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    content = page.read_text() if page.exists() else "# Benchmarks\n"
    before, found, rest = content.partition(begin)
    after = rest.partition(end)[2] if found else "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before if found else content.rstrip() + chr(10) * 2}{begin}\n{text}\n{end}{after}")


def figures_of(text: str) -> dict[str, Any]:
    """The settings of a generated section, and the rows of its table by column."""
    lines = text.splitlines()  # has at most one table
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]  # after the rule
    return {"settings": [line.removeprefix("- ") for line in lines if line.startswith(("- ", "**"))], "rows": rows}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
