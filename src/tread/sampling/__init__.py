"""Sampling: ODE solvers, guidance (public, also for stock pipelines), `generate`, and image grids.

It imports `tread.objectives`, `tread.attach`, `tread.routing` and `tread.errors`; no data and no job.
"""
