"""One case after the other: strike, give the same command again until it ends, and compare with the undisturbed job."""

import argparse
import itertools
import json
import random
import re
import shutil
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from faults.child import Ended, run
from faults.jobs import JOBS
from faults.outcome import difference, newest_step, outcome
from faults.strikes import FAULTS, Fault, fault_of

STRIKES = (1, 1, 2, 3)
"""Faults in a row of one case, one of these numbers."""
CHARACTERS = 500
"""Limit of a message."""


@dataclass(frozen=True)
class Reference:
    """The undisturbed job: its command, its events, and what it left and printed."""

    job: str
    command: list[str]
    events: list[str]
    left: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One case: how often a fault ended the job, and what was wrong, if anything."""

    ended: int
    wrong: str = ""


def schedule(kills: int, jobs: list[str]) -> Iterator[tuple[str, int]]:
    """Job and number of each case; there are as many as it takes to send SIGKILL `kills` times."""
    for job in jobs:
        left = -(-kills // len(jobs))
        for case in itertools.count():
            if left == 0:
                break
            yield job, case
            left -= fault_of(case, JOBS[job].workers) == "kill"


def undisturbed(job: str, scratch: Path) -> Reference:
    """Make what a job needs and run it, both in `scratch`."""
    inputs, folder, log = (scratch / name for name in (f"{job}.inputs", job, f"{job}.events"))
    inputs.mkdir()
    folder.mkdir()
    command = JOBS[job].command(inputs)

    def note(event: str) -> None:
        with log.open("a") as file:
            file.write(f"{event}\n")

    ended = run(command, folder, note)
    if ended.status:
        raise RuntimeError(f"{job}, undisturbed, {ended}")
    return Reference(job, command, log.read_text().splitlines(), _left(folder, ended))


def attempt(reference: Reference, case: int, folder: Path, seed: int = 0) -> Outcome:
    """Run one case in `folder`: up to three faults in a row, then the command comes to its end."""
    folder.mkdir()
    rng = random.Random(f"{seed} {reference.job} {case}")
    fault = FAULTS[fault_of(case, JOBS[reference.job].workers)]
    moments = [n for n, event in enumerate(reference.events, 1) if event.startswith(fault.at)]
    ends, kept = 0, 0
    for number in range(rng.choice(STRIKES)):
        moment = rng.choice(moments)
        ended, where = _struck(reference, folder, fault, moment, rng.random())
        ends += ended.status != 0
        told = f"{where} (event {moment} of {len(reference.events)}, status {ended.status})"
        if wrong := bad_end(fault, ended, sure=fault.sure and (number == 0 or bool(where))):
            return Outcome(ends, f"at {told}: {wrong}")
        if number == 0:  # only the first strike comes at a known point of the job
            kept = _saved_before(reference.events, moment)
        found = newest_step(folder)
        if found < kept:
            return Outcome(ends, f"at {told}: the checkpoint of step {kept} was lost")
        kept = found
    ended = run(reference.command, folder, lambda _: None)
    if ended.status:
        return Outcome(ends, f"the command given again {ended}")
    if kept and f"resumed from run/checkpoints/step-{kept:08d}" not in ended.out:
        return Outcome(ends, f"it did not resume from step {kept}: {ended.out[-2000:]}")
    return Outcome(ends, difference(reference.left, _left(folder, ended)))


def _struck(reference: Reference, folder: Path, fault: Fault, moment: int, amount: float) -> tuple[Ended, str]:
    """Run the command with a fault at event `moment`; returns that event too, empty if there were not so many."""
    log, numbers = folder.with_suffix(".struck"), itertools.count(1)
    log.unlink(missing_ok=True)
    lock = threading.RLock()  # else another thread's strike fills the disk before the event is written

    def tell(event: str) -> None:
        with lock:
            number = next(numbers)
            if number == moment:
                log.write_text(event)
            if number >= moment:
                fault.strike(event, number == moment, amount)

    ended = run(reference.command, folder, tell, fault.prepare)
    return ended, log.read_text() if log.exists() else ""


def bad_end(fault: Fault, ended: Ended, *, sure: bool) -> str:
    """What is wrong with the end of a job that was struck."""
    if ended.hung or "Traceback" in ended.err or (ended.status not in fault.ends and (ended.status or sure)):
        return f"it {ended}"
    if not fault.says or ended.status == 0:
        return ""
    said = re.split(r"[\r\n]", ended.err.strip())[-1]
    if not said.startswith("tread ") or "[Errno" in said or len(said) > CHARACTERS + 20:
        return f"its last words are no sentence of ours: {said!r}"
    return ""


def _saved_before(events: list[str], moment: int) -> int:
    """The step of the last checkpoint that got its name before an event."""
    found = [re.search(r"checkpoints/step-(\d+)$", event) for event in events[: moment - 1] if "rename" in event]
    return max((int(match[1]) for match in found if match), default=0)


def _left(folder: Path, ended: Ended) -> dict[str, Any]:
    """Everything that a job is run for: its files, and the figures that it prints as JSON."""
    figures = {"figures": json.loads(ended.out)} if ended.out.startswith("{") else {}
    return outcome(folder) | figures


def work(rank: int, options: argparse.Namespace) -> tuple[Counter[tuple[str, str]], ...]:
    """Every so-manieth case: counts by job and fault of cases, of jobs that a fault ended, and of equal outcomes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases, ends, equal = Counter(), Counter(), Counter()
    references: dict[str, Reference] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        scratch = Path(name).resolve()
        for number, (job, case) in enumerate(options.cases):
            if number % options.processes != rank:
                continue
            if job not in references:
                references[job] = undisturbed(job, scratch)
            folder = scratch / f"{job}-{case}"
            result = attempt(references[job], case, folder, options.seed)
            key = job, fault_of(case, JOBS[job].workers)
            cases[key] += 1
            ends[key] += result.ended
            equal[key] += not result.wrong
            shutil.rmtree(folder)
            if result.wrong:
                print(f"{job}, {key[1]}: {result.wrong}", flush=True)
                print(f"repeat it: python -m faults --jobs {job} --seed {options.seed} --case {case}", flush=True)
            elif cases.total() % 10 == 0:
                print(f"process {rank}: {cases.total()} cases, {equal.total()} of them equal", flush=True)
    return cases, ends, equal
