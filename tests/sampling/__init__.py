"""Tests of sar.sampling."""
