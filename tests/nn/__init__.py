"""Tests of sar.nn."""
