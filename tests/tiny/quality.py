"""Pictures, jobs and a scale small enough for a CPU."""

from dataclasses import replace
from pathlib import Path
from time import time

import numpy as np
import torch

from benchmarks.quality.arms import SCALES
from benchmarks.quality.jobs import Job, Spec

SMOKE = SCALES["smoke"]
CPU = torch.device("cpu")
SECONDS = 0.5
"""Of the routed run; a step takes 0.05, see `tests.benchmarks.quality.conftest.clock`."""


def pictures(count: int, seed: int) -> np.ndarray:
    """(N, 32, 32, 3), smooth enough that their features differ."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), np.uint8)
    return coarse.repeat(8, 1).repeat(8, 2)


def job_of(arm: str, **changes: object) -> Job:
    equal_to = "dense" if arm == "routed" else None
    job = Job(arm=arm, seed=0, seconds=0.3, steps=None, marks=(0.1,), guides=("cfg",), equal_to=equal_to)
    return replace(job, **changes)  # pyright: ignore[reportArgumentType]


def spec_of(prepared: Path, out: Path, *jobs: Job, seconds: float = 1e9) -> Spec:
    return Spec(jobs=jobs, scale="smoke", work=str(prepared), out=str(out), resume=(), ends=time() + seconds)
