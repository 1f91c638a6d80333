"""Tests on devices that are not the CPU; `pytest -m gpu` runs those that need a real one."""
