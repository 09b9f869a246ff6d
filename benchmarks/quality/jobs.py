"""The job queue: the runs, how each is sampled and evaluated, and the expected durations.

- A finished run that lacks samples of some guidance is sampled from its saved weights, if they are still in the work
  folder. So all runs are trained first and guided afterwards: an interrupted experiment has trained all it could.
- Durations are estimates for one H200 until the speed of sampling has been measured.
"""

import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .arms import GUIDE_BY_NAME, SCALES, UNGUIDED, Arm, Guide, Scale, arm_of
from .results import Results, run_name, snapshot

Ways = list[Guide]
"""Guidance settings to sample with."""
Kind = tuple[str, tuple[float, ...], bool]
"""Runs of one kind, by size, ratios and whether there is a cool-down, share their compiled code."""
START_SECONDS, COMPILE_SECONDS, JUDGE_SECONDS, VALIDATE_SECONDS = 15.0, 25.0, 8.0, 0.5
FORWARDS_PER_SECOND = {"S": 25_000.0, "B": 8_000.0}
IMAGES_PER_SECOND = 4_000.0
"""Throughput of the feature extractor."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to make."""

    arm: str
    seed: int
    seconds: float
    steps: int | None
    marks: tuple[float, ...]
    guides: tuple[str, ...]
    """Guidance settings to sample with at the end of the run, besides unguided."""
    equal_to: str | None
    """The dense arm at whose final step a routed run is evaluated, too."""
    anneal: float = 0.0
    """Seconds of training after the run's end, in which the rate falls to zero."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return run_name(self.arm, self.seed, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The specification passed to a worker process."""

    jobs: tuple[Job, ...]
    scale: str
    work: str
    out: str
    resume: tuple[str, ...]
    ends: float
    """Deadline, as of `time.time()`."""

    @classmethod
    def read(cls, text: str) -> "Spec":
        """Parse a spec from JSON."""
        raw = json.loads(text)
        jobs = [Job(**job | {"marks": tuple(job["marks"]), "guides": tuple(job["guides"])}) for job in raw["jobs"]]
        return cls(**raw | {"jobs": tuple(jobs), "resume": tuple(raw["resume"])})

    def results(self) -> Results:
        """The current results; refuses those of another scale."""
        loaded = Results(Path(self.out), [Path(path) for path in self.resume])
        loaded.check_scale(asdict(SCALES[self.scale]))
        return loaded


def looks(arm: Arm, job: Job) -> dict[str, Ways]:
    """The ways to sample at each type of stop: `mark`, `end`, `equal-steps` and `annealed`."""
    guides = [GUIDE_BY_NAME[name] for name in job.guides] if arm.is_guided else []
    usable = [
        guide
        for guide in guides
        if (arm.is_routed or not guide.branches.needs_routes) and (job.marks or not guide.branches.needs_weak)
    ]
    also = {"equal-steps": job.equal_to is not None, "annealed": job.anneal > 0}
    return {"mark": [UNGUIDED], "end": [UNGUIDED, *usable], **{at: [UNGUIDED] for at in also if also[at]}}


def in_order(jobs: Sequence[Job], results: Results) -> Iterator[Job]:
    """Runs to be made, without guidance; then those that are done, for the guidance they lack."""
    yield from (replace(job, guides=()) for job in jobs if not results.is_done(job.name))
    yield from (job for job in jobs if results.is_done(job.name))


def weights_file(work: Path, job: Job, at: str) -> Path:
    """The path of a run's averaged weights."""
    return work / "weights" / f"{job.name}-{at}.safetensors"


def missing_ways(job: Job, results: Results, work: Path) -> Ways:
    """The ways in which a finished run is still to be sampled; empty if its weights are gone."""
    entry = results.runs[job.name]
    end = snapshot(entry, "end")
    assert end is not None
    ways = looks(arm_of(job.arm), job)["end"]
    saved = {at: weights_file(work, job, at).is_file() for at in ("end", "mark")}
    return [
        guide
        for guide in ways
        if guide.name not in end["samples"] and saved["end"] and (saved["mark"] or not guide.branches.needs_weak)
    ]


def expected_seconds(job: Job, scale: Scale, results: Results, work: Path) -> float:
    """Expected seconds of a run and its evaluation, without compilation; 0 if nothing is left to do."""
    arm = arm_of(job.arm)
    rates = [entry["forwards_per_second"] for entry in results.runs.values() if entry["arm"]["size"] == arm.size]
    measured = [rate for rate in rates if rate]
    rate = measured[-1] if measured else FORWARDS_PER_SECOND[arm.size]
    if results.is_done(job.name):
        stops, seconds = {"end": missing_ways(job, results, work)}, 0.0
    else:
        stops = looks(arm, job)
        seconds = job.seconds + VALIDATE_SECONDS * (1 + job.seconds / scale.validate_seconds) + job.anneal
    for at, ways in stops.items():
        for guide in ways:
            branches = 1.0 if guide.scale == 1 else 2.0
            drawing = scale.samples * scale.solver_steps * branches / rate
            one = drawing + scale.samples / IMAGES_PER_SECOND + JUDGE_SECONDS
            seconds += one * (len(job.marks) if at == "mark" else 1)
    return seconds


def kind_of(arm: Arm) -> Kind:
    """The key of runs that share compiled code."""
    return arm.size, tuple(sorted({ratio for ratio, *_ in arm.windows})), arm.cooldown > 0


def compile_seconds(job: Job, scale: Scale, compiled: Collection[Kind]) -> float:
    """Expected seconds of compilation in a process that has already `compiled` these kinds."""
    return COMPILE_SECONDS if scale.compile and kind_of(arm_of(job.arm)) not in compiled else 0.0


def plan(spec: Spec, scale: Scale) -> str:
    """The remaining jobs with their expected durations, as text."""
    results, compiled, seconds = spec.results(), set[Kind](), dict[str, float]()
    for job in spec.jobs:
        seconds[job.name] = expected_seconds(job, scale, results, Path(spec.work))
        if seconds[job.name]:
            seconds[job.name] += compile_seconds(job, scale, compiled)
            compiled.add(kind_of(arm_of(job.arm)))
    total = START_SECONDS + sum(seconds.values())
    lines = [f"{name:<24} {f'{value:6.0f} s' if value else '    done'}" for name, value in seconds.items()]
    lines = [f"{'start':<24} {START_SECONDS:6.0f} s", *lines, f"{'in all':<24} {total:6.0f} s, {total / 60:.1f} min"]
    if (left := spec.ends - time.time()) < total:
        lines.append(f"{'budget':<24} {left:6.0f} s: what does not fit is not begun; raise --budget-minutes")
    return "\n".join(lines)
