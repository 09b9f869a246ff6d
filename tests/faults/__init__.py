"""Tests of the fault harness, and a small share of its cases."""
