"""The memory that the demo reports."""

import os
from pathlib import Path

import pytest
import torch

from sar.host import memory
from sar.host.memory import PeakMemory, available_memory

MEGA = 2**20


def test_a_peak_counts_after_it_is_over_and_earlier_ones_do_not() -> None:
    earlier = torch.ones(200 * MEGA // 4)
    del earlier
    memory = PeakMemory()
    assert memory.above_baseline() < 50 * MEGA
    block = torch.ones(100 * MEGA // 4)
    del block
    assert 95 * MEGA < memory.above_baseline() < 130 * MEGA


def group(path: Path, most: str, taken: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{most}\n")
    (path / "memory.stat").write_text(f"anon {taken}\nfile 999999\n")


def test_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process's control group and those above it, in either version; page cache makes room."""
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "_OWN_GROUP", tmp_path / "cgroup")
    assert MEGA < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "cgroup").write_text("0::/above/own\n")
    group(tmp_path / "groups" / "above" / "own", "max", 1000)
    assert available_memory() > MEGA
    group(tmp_path / "groups" / "above", "9000", 2000)
    assert available_memory() == 7000
    (tmp_path / "cgroup").write_text("0::/\n4:memory:/own\n")  # in a container, which sees its own group as the root
    first = tmp_path / "groups" / "memory"
    first.mkdir()
    (first / "memory.stat").write_text("cache 5\nhierarchical_memory_limit 6000\ntotal_rss 1000\n")
    assert available_memory() == 5000
