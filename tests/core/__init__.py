"""Tests of sar.core."""
