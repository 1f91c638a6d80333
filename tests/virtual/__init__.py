"""Tests of virtual workers."""
