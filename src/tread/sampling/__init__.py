"""Sampling: solvers over a field, guidance around a field, and `generate`, which puts them together."""
