"""The pictures in docs/pictures/ are what tools/drawings.py makes, and show what is so where that can be computed."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from sar.outofcore.turns import Turns
from sar.outofcore.workers import WorkerThreads
from tools import drawings


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_pictures_are_what_the_code_makes(name: str) -> None:
    made = drawings.DRAWINGS[name]()
    ElementTree.fromstring(made)
    message = "draw it anew: python -m tools.drawings"
    assert (drawings.FOLDER / f"{name}.svg").read_text() == made, message


def test_every_picture_is_on_the_page() -> None:
    page = (drawings.DOCS / "pictures.md").read_text()
    assert [name for name in drawings.DRAWINGS if f"(pictures/{name}.svg)" not in page] == []
    assert {file.stem for file in drawings.FOLDER.iterdir()} == set(drawings.DRAWINGS)


def test_what_a_worker_holds_in_each_mode() -> None:
    one, two, three = (drawings._held(mode) for mode in (1, 2, 3))
    assert max(one) == drawings.TILE
    assert max(two) == max(three) == drawings.LAYERS * drawings.HALO
    assert all(a <= b for a, b in zip(two, three, strict=True))


def test_memory_is_read_from_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "model", "trained by", "mode", "MB at peak"
    cells = (
        ("GAT", "1 process, DGL", "", "500"),
        ("GAT", "2 workers, sar", "1", "200"),
        ("GAT", "2 workers, sar", "2", "300"),
    )
    rows = [dict(zip(names, row, strict=True)) for row in cells]
    (tmp_path / "figures.json").write_text(json.dumps({"rmat": {"rows": rows}}))
    monkeypatch.setattr(drawings, "DOCS", tmp_path)
    assert drawings._measured() == {"GAT": {1: 500.0, 2: 200.0}}


def test_turns_are_taken_as_drawn() -> None:
    """Three threads and three meetings, by the turns of virtual workers themselves."""
    told: list[tuple[int, int]] = []

    def work(place: int) -> None:
        for call in range(3):
            told.append((place, call))
            turns.meet(place, "a call", None, lambda brought: None, lambda: None)

    turns = Turns(3, 0)
    threads = WorkerThreads(turns, work)
    threads.run()
    assert threads.failures == {}
    assert told == [(worker, call) for worker, calls in drawings._stretches(3, 3) for call in calls]
