"""Guidance: weak + scale * (strong - weak), for fields and for stock pipelines.

The names below are public. The package imports `tread.objectives`, `tread.attach` (for pipelines), `tread.routing` and
`tread.errors`.
"""

from tread.sampling.guidance.branches import KINDS, SCHEDULES, Branches
from tread.sampling.guidance.fields import Ratio, away_from, classifier_free, cosine, sparse, unconditional
from tread.sampling.guidance.pipeline import guide

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Branches",
    "Ratio",
    "away_from",
    "classifier_free",
    "cosine",
    "guide",
    "sparse",
    "unconditional",
]
