"""What the tests of the experiment share: prepared images, a judge, and one dense and one routed run."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality import training
from benchmarks.quality.__main__ import main
from benchmarks.quality.images import mosaic
from benchmarks.quality.judge import Judge, load_judge_network
from benchmarks.quality.results import Results
from benchmarks.quality.run import blank, work
from benchmarks.quality.training import Trial
from tests.benchmarks.ticks import Ticks
from tests.tiny.quality import CPU, SECONDS, SMOKE, job_of, pictures, spec_of


@pytest.fixture(scope="package", autouse=True)
def clock() -> Iterator[None]:
    """A run's clock moves by a twentieth of a second for each batch that is taken, and by nothing else."""
    ticks, batches = Ticks(), Trial.batches

    def ticking(self: Trial, start_step: int) -> Iterator[Any]:
        for batch in batches(self, start_step):
            ticks.now += 0.05
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "time", ticks)
        patch.setattr(Trial, "batches", ticking)
        yield


@pytest.fixture(scope="package")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with 200 training and 100 test images."""
    folder = tmp_path_factory.mktemp("quality")
    (folder / "parts").mkdir()
    for split, count in (("train", 200), ("test", 100)):
        Image.fromarray(mosaic(pictures(count, len(split)))).save(folder / "parts" / f"{split}-0.webp", lossless=True)
        np.save(folder / "parts" / f"{split}-0.npy", np.arange(count) % 10)
    assert main(["prepare", str(folder / "parts"), "--work", str(folder / "work"), "--smoke"]) == 0
    return folder / "work"


@pytest.fixture(scope="package")
def judge(prepared: Path) -> Judge:
    return Judge(prepared, load_judge_network(prepared, CPU, smoke=True), SMOKE)


@pytest.fixture(scope="package")
def found(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Dense and routed, as the worker makes them."""
    out = tmp_path_factory.mktemp("found")
    shutil.rmtree(prepared / "weights", ignore_errors=True)
    jobs = job_of("dense"), job_of("routed", seconds=SECONDS, marks=(0.1,)), job_of("dense", seconds=SECONDS)
    # the dense run of the same seconds is put down as one of 5 steps, which the routed one then stops at
    results = Results(out)
    dense = blank(jobs[2]) | {"status": "done", "steps": 5, "steps_per_second": 3.0}
    results.write(jobs[2].name, dense)
    assert work(spec_of(prepared, out, *jobs[:2])) == 0
    results = Results(out)
    del results.runs[jobs[2].name]
    results.write(jobs[1].name, results.runs[jobs[1].name])
    return results
