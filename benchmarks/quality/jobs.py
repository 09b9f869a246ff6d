"""What is to be done: the runs, how each is looked at, and how long that takes.

- A run that is done and lacks a way to sample is sampled from its weights, where they are still in the work folder.
  So all runs are made first and guided after: an experiment that is cut short has trained as much as it could.
- Times are guessed from one H200 until the speed of sampling was measured.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .arms import BY_NAME, GUIDE_BY_NAME, SCALES, UNGUIDED, Arm, Guide, Scale
from .results import Results, run_name, snapshot

Ways = list[Guide]
"""How to sample."""
Kind = tuple[str, float, bool]
"""Runs of one kind, by size, ratio and whether there is a cool-down, share their compiled code."""
START_SECONDS, COMPILE_SECONDS, JUDGE_SECONDS, VALIDATE_SECONDS = 15.0, 25.0, 8.0, 0.5
FORWARDS_PER_SECOND = {"S": 25_000.0, "B": 8_000.0}
IMAGES_PER_SECOND = 4_000.0
"""Through the extractor."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to make."""

    arm: str
    seed: int
    seconds: float
    steps: int | None
    marks: tuple[float, ...]
    guides: tuple[str, ...]
    """Besides unguided sampling, at the end of the run."""
    equal_to: str | None
    """The dense arm at whose steps a routed run is looked at, too."""

    @property
    def name(self) -> str:
        """Of the run."""
        return run_name(self.arm, self.seed, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a worker is told."""

    jobs: tuple[Job, ...]
    scale: str
    work: str
    out: str
    resume: tuple[str, ...]
    ends: float
    """By time.time()."""

    @classmethod
    def read(cls, text: str) -> "Spec":
        """From JSON."""
        raw = json.loads(text)
        jobs = [Job(**job | {"marks": tuple(job["marks"]), "guides": tuple(job["guides"])}) for job in raw["jobs"]]
        return cls(**raw | {"jobs": tuple(jobs), "resume": tuple(raw["resume"])})

    def results(self) -> Results:
        """As they stand; refuses those of another scale."""
        found = Results(Path(self.out), [Path(path) for path in self.resume])
        found.check_scale(asdict(SCALES[self.scale]))
        return found


def looks(arm: Arm, job: Job) -> dict[str, Ways]:
    """At each kind of stop, the ways to sample."""
    guides = [GUIDE_BY_NAME[name] for name in job.guides] if arm.is_guided else []
    usable = [
        guide
        for guide in guides
        if (arm.is_routed or not guide.branches.needs_routes) and (job.marks or not guide.branches.needs_weak)
    ]
    found = {"mark": [UNGUIDED], "end": [UNGUIDED, *usable]}
    return found if job.equal_to is None else found | {"equal-steps": [UNGUIDED]}


def in_order(jobs: Sequence[Job], results: Results) -> Iterator[Job]:
    """Runs to be made, without guidance; then those that are done, for the guidance they lack."""
    yield from (replace(job, guides=()) for job in jobs if not results.is_done(job.name))
    yield from (job for job in jobs if results.is_done(job.name))


def weights_file(work: Path, job: Job, at: str) -> Path:
    """Where the averaged weights of a run are kept."""
    return work / "weights" / f"{job.name}-{at}.safetensors"


def missing_ways(job: Job, results: Results, work: Path) -> Ways:
    """How a run that is done is still to be sampled; nothing where its weights are gone."""
    entry = results.runs[job.name]
    end = snapshot(entry, "end")
    assert end is not None
    ways = looks(BY_NAME[job.arm], job)["end"]
    here = {at: weights_file(work, job, at).is_file() for at in ("end", "mark")}
    return [
        guide
        for guide in ways
        if guide.name not in end["samples"] and here["end"] and (here["mark"] or not guide.branches.needs_weak)
    ]


def expected_seconds(job: Job, scale: Scale, results: Results, work: Path) -> float:
    """How long a run and its figures take, without what is compiled; 0 where nothing is left to do."""
    arm = BY_NAME[job.arm]
    rates = [entry["forwards_per_second"] for entry in results.runs.values() if entry["arm"]["size"] == arm.size]
    measured = [rate for rate in rates if rate]
    rate = measured[-1] if measured else FORWARDS_PER_SECOND[arm.size]
    if results.is_done(job.name):
        stops, seconds = {"end": missing_ways(job, results, work)}, 0.0
    else:
        stops = looks(arm, job)
        seconds = job.seconds + VALIDATE_SECONDS * (1 + job.seconds / scale.validate_seconds)
    for at, ways in stops.items():
        for guide in ways:
            branches = 1.0 if guide.scale == 1 else 2.0
            drawing = scale.samples * scale.solver_steps * branches / rate
            one = drawing + scale.samples / IMAGES_PER_SECOND + JUDGE_SECONDS
            seconds += one * (len(job.marks) if at == "mark" else 1)
    return seconds


def kind_of(arm: Arm) -> Kind:
    """What decides which shapes a run compiles."""
    return arm.size, arm.ratio, arm.cooldown > 0


def compile_seconds(job: Job, scale: Scale, compiled: Collection[Kind]) -> float:
    """What a run takes besides, in a process that has `compiled` these kinds."""
    return COMPILE_SECONDS if scale.compile and kind_of(BY_NAME[job.arm]) not in compiled else 0.0


def plan(spec: Spec, scale: Scale) -> str:
    """What is to be done, and how long it takes."""
    results, compiled, seconds = spec.results(), set[Kind](), dict[str, float]()
    for job in spec.jobs:
        seconds[job.name] = expected_seconds(job, scale, results, Path(spec.work))
        if seconds[job.name]:
            seconds[job.name] += compile_seconds(job, scale, compiled)
            compiled.add(kind_of(BY_NAME[job.arm]))
    total = START_SECONDS + sum(seconds.values())
    lines = [f"{name:<24} {f'{value:6.0f} s' if value else '    done'}" for name, value in seconds.items()]
    return "\n".join(
        [f"{'start':<24} {START_SECONDS:6.0f} s", *lines, f"{'in all':<24} {total:6.0f} s, {total / 60:.1f} min"]
    )
