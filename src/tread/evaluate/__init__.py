"""Evaluation of a set of images: Frechet distances, precision and recall, kernel distance, Inception Score.

Feature extractors, their statistics and the metrics belong here; what a trainer evaluates and when is the job's. It
imports `tread.data`, `tread.routing` (noise, warnings), `tread.files` and `tread.errors`.
"""
