"""The page on graphs larger than memory takes its table and picture from what `benchmarks.out_of_core` measured."""

import json
from pathlib import Path

import pytest

from benchmarks import out_of_core_page
from benchmarks.out_of_core import Run
from sar.errors import ConfigError
from tests.workers import REPOSITORY


def made_up(parts: int) -> Run:
    return Run("SAGE", parts, [3.0, 2.5], 400 / parts, 450 / parts, 1.0 + 0.1 * (parts - 1), 10.0 * parts, 1.0)


def test_from_results_to_the_page(tmp_path: Path) -> None:
    results = tmp_path / "out-of-core.json"
    results.write_text(json.dumps([made_up(parts)._asdict() | {"more": 1} for parts in (1, 4, 8)]))
    out_of_core_page.main([str(results), "--docs", str(tmp_path), "--command", "python -m benchmarks.out_of_core"])
    page = (tmp_path / "out_of_core.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "SAGE" in line]
    assert rows[0] == ["SAGE", "in memory", "400", "1", "1.00", "1.00"]
    assert rows[2] == ["SAGE", "8", "50", "1 / 8.0", "1.70", "1.70"]
    assert 10_000 < (tmp_path / out_of_core_page.PICTURE).stat().st_size < 100_000


def test_what_holds_no_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[{}]")
    with pytest.raises(ConfigError, match="holds no results"):
        out_of_core_page.main([str(tmp_path / "other.json"), "--docs", str(tmp_path)])


def test_the_page_has_a_place_for_them() -> None:
    page = (REPOSITORY / "docs" / "out_of_core.md").read_text()
    assert page.index("<!-- generated: out of core -->") < page.index("<!-- end: out of core -->")
    assert (REPOSITORY / "docs" / out_of_core_page.PICTURE).exists()
