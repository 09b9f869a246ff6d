"""Tests of the fuzzer, and a small share of its mutations."""
