"""Everything that fits a budget, one process per job, merged into one file and one table.

    python -m benchmarks.all --budget-minutes 8
    python -m benchmarks.all --budget-minutes 8 --jobs flux flux-flash dit-xl --name attention
    python -m benchmarks.all --smoke                  # tiny, on a CPU
    python -m benchmarks.all --list

- Jobs run in order of importance. A job that crashes, hangs or runs out of memory costs itself alone; what it had
  measured by then is kept.
- First, all jobs compile at once with few layers (a layer's code does not depend on how many there are): the
  compiler's cache on disk then serves the measurements, which run one at a time. `--no-warm` leaves this out.
- Results: OUT/GPU-NAME.json after every job, OUT/GPU-NAME.md with the table, OUT/GPU-NAME-curve.png.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.record import RESULTS, device_slug, machine, write_json
from benchmarks.common.targets import table

GRACE = 20.0
"""Seconds that a job may run on after its budget, to end the measurement it is in."""
WARM_SHARE = 0.3
"""Of the budget, at most, for compiling."""
COMPILE_THREADS = "4"
"""Of each process, while all of them compile."""


@dataclass(frozen=True)
class Job:
    """One process."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    limit: float = 120.0
    """Seconds at most."""
    main: bool = True
    """Part of the table; others are variants that run when named or when time is left."""


JOBS = (
    Job("flux", "flux", ("--variants", "graphs", "selective", "compiled"), 180),
    Job("loop", "loop", ("--ways", "call", "own-compile"), 280),
    Job("dit-xl", "dit", ("--models", "XL/2"), 120),
    Job("dit-b", "dit", ("--models", "B/2"), 100),
    Job("dit-float8", "dit", ("--models", "XL/2", "--variants", "rowwise-stream"), 60),
    Job("flux-8bit", "quantized", ("--variants", "fp8-matmul"), 100),
    Job("sd3", "sd3", limit=90),
    Job("wan", "wan", limit=120),
    Job("curve", "curve", ("--seconds", "4"), 90),
    Job("flux-host", "flux", ("--variants", "checkpointed-around", "eager"), 120),
    Job("flux-int8", "quantized", ("--variants", "int8"), 100, main=False),
    Job("flux-two-copies", "quantized", ("--variants", "float8-two-copies"), 100, main=False),
    Job("flux-fp8-forward", "quantized", ("--variants", "fp8-forward"), 100, main=False),
    Job("flux-flash", "flux", ("--variants", "flash"), 100, main=False),
    Job("dit-flash", "dit", ("--models", "XL/2", "B/2", "--variants", "flash"), 60, main=False),
    Job("dit-float8-others", "dit", ("--models", "XL/2", "--variants", "tensorwise-stream", "rowwise"), 90, main=False),
    Job("dit-float8-torchao", "dit", ("--models", "XL/2", "--variants", "float8-torchao"), 60, main=False),
    Job("dit-whole", "dit", ("--models", "XL/2", "B/2", "--variants", "whole-stream"), 120, main=False),
    Job("flux-bf16-lora", "flux", ("--variants", "bf16-lora", "bf16-lora-copied"), 90, main=False),
    Job("flux-max-autotune", "flux", ("--variants", "max-autotune"), 150, main=False),
    Job("wan-flash", "wan", ("--variants", "flash"), 120, main=False),
    Job("sd3-flash", "sd3", ("--variants", "flash"), 120, main=False),
    Job("dit-max-autotune", "dit", ("--models", "XL/2", "--variants", "max-autotune"), 120, main=False),
    Job("dit-plain-norms", "dit", ("--models", "XL/2", "B/2", "--variants", "stream-plain-norms"), 90, main=False),
    Job("flux-torch-graphs", "flux", ("--variants", "torch-graphs"), 120, main=False),
    Job("flux-default-sdpa", "flux", ("--variants", "default-sdpa"), 120, main=False),
    Job("flux-torchao", "quantized", ("--variants", "torchao-float8-dynamic", "torchao-int8-dynamic"), 120, main=False),
    Job("offload", "offload", limit=300, main=False),
    Job("attention", "attention", limit=40, main=False),
    Job("hooks", "hooks", limit=30, main=False),
)


class Run:
    """Jobs within one budget."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.ends = time.monotonic() + given.budget_minutes * 60
        slug = "smoke" if given.smoke else device_slug()
        self.path: Path = given.out / f"{slug}-{given.name}.json"
        self.facts: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks.all", *sys.argv[1:]]),
            "machine": machine(),
            "jobs": [],
        }

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def warm(self, jobs: Sequence[Job]) -> None:
        """Compile for all jobs at once."""
        start = time.monotonic()
        limit = self.left * WARM_SHARE
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS}
        running = [(job, self._start(job, ["--warm"], limit, environment)) for job in jobs if job.script != "hooks"]
        codes = {job.name: _finish(process, start + limit - time.monotonic()) for job, process in running}
        self.facts["warm"] = {"seconds": round(time.monotonic() - start, 1), "exit_codes": codes}
        print(f"== compiled in {self.facts['warm']['seconds']} s: {codes}", flush=True)

    def measure(self, job: Job) -> None:
        """Run one job and merge what it wrote."""
        limit = min(job.limit, self.left)
        entry: dict[str, Any] = {"job": job.name, "main": job.main}
        if limit < min(30.0, job.limit) and not self.given.smoke:
            entry["exit_code"] = "skipped: out of time"
        else:
            print(f"== {job.name}, {limit:.0f} s at most, {self.left:.0f} s left", flush=True)
            start = time.monotonic()
            process = self._start(job, [], limit, dict(os.environ))
            entry["exit_code"] = _finish(process, limit + GRACE)
            entry["seconds"] = round(time.monotonic() - start, 1)
        part = self.folder / f"{job.name}.json"
        if part.is_file():
            entry |= json.loads(part.read_text())
        log = self.folder / f"{job.name}.log"
        if entry["exit_code"] != 0 and log.is_file():
            entry["log_tail"] = log.read_text(errors="replace")[-4000:]
        self.facts["jobs"].append(entry)
        write_json(self.path, self.facts)
        self.path.with_suffix(".md").write_text(self.table() + "\n")

    def table(self) -> str:
        """What is measured so far."""
        found = (one for job in self.facts["jobs"] for one in job.get("measurements", ()))
        return table(found, judged=not self.given.smoke)

    def _start(self, job: Job, extra: list[str], limit: float, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"benchmarks.{job.script}", *job.arguments, *extra]
        command += ["--budget-seconds", f"{limit:.0f}", "--out", str(self.folder / f"{job.name}.json")]
        if self.given.smoke:
            command.append("--smoke")
        if job.script == "curve":
            command += ["--figure", str(self.path.with_name(f"{self.path.stem}-curve.png"))]
        if extra:
            log = (self.folder / f"{job.name}.warm.log").open("wb")
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        with (self.folder / f"{job.name}.log").open("wb") as log:
            return subprocess.Popen(command, stderr=log, env=environment, start_new_session=True)


def _finish(process: subprocess.Popen[bytes], seconds: float) -> int | str:
    """Wait for a job; one that takes too long is ended with the compiler processes it started."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "ended: out of time"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs; 0 when every main one succeeded."""
    names = [job.name for job in JOBS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-minutes", type=float, default=8.0)
    parser.add_argument("--jobs", nargs="+", choices=names, metavar="JOB", help="these alone, in this order")
    parser.add_argument("--name", default="all", help="the end of the results' names")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--no-warm", action="store_true", help="do not compile ahead")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU, without variants unless named")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    given = parser.parse_args(arguments)
    if given.list:
        for job in JOBS:
            print(f"{job.name:22} {'' if job.main else '(variant) '}python -m benchmarks.{job.script}", *job.arguments)
        return 0
    by_name = {job.name: job for job in JOBS}
    chosen = [job for job in JOBS if job.main or not given.smoke]
    jobs = [by_name[name] for name in given.jobs] if given.jobs else chosen
    with tempfile.TemporaryDirectory() as folder:
        run = Run(given, Path(folder))
        if not (given.smoke or given.no_warm):
            run.warm([job for job in jobs if job.main or given.jobs])
        for job in jobs:
            run.measure(job)
    print(f"\n{run.table()}\n\nresults: {run.path}", flush=True)
    return 0 if all(job["exit_code"] == 0 for job in run.facts["jobs"] if job["main"] or given.jobs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
