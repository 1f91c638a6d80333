"""Tests of sar.comm."""
