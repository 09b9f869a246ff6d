"""Sampling: ODE solvers, guidance (public, also for stock pipelines), `generate`, and image grids.

The package imports `tread.objectives`, `tread.attach`, `tread.routing` and `tread.errors`, and knows no data or job.
"""
