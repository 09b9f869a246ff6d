"""The runs of the experiment: the base, then each arm with each seed and rate.

- An arm's seeds and rates share what was compiled: its weights are put back between them.
- A run that would not fit into the time left is not begun; every finished one is on disk before the next begins.
- A rehearsal compiles what the arms will run, beside the base: it takes no times.
"""

import argparse
import gc
import json
import time
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import Facts
from tread.autotune.tuning import CONFIG_FILE
from tread.routing.plan import RoutePlan

from .arms import TUNED, Arm
from .base import train_base
from .experiment import Experiment
from .plan import CHOSEN, Tuned, missing_runs, plan, run_name
from .results import Results
from .training import Run, steps_within

VALIDATIONS = 4
"""Validation losses of an arm, at equal distances; the last one is at its end."""
TIMED_STEPS = 1000
"""Total steps of the schedule that step times are taken under; its levels are those of any length."""


def tune(experiment: Experiment, arm: Arm, runs: Sequence[Tuned], results: Mapping[int, Results], base: Path) -> bool:
    """Train an arm with each seed and rate, by the clock; False if the budget ended before the last."""
    began = time.monotonic()
    if not experiment.fits(arm, runs[0].rate, first=True):
        return False
    if experiment.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = new_run(experiment, arm, base, seed=runs[0].seed)
    start = [parameter.detach().clone() for parameter in run.parameters]
    per_level = known_times(results, arm) or run.seconds_by_scale()
    steps = steps_within(experiment.given.seconds, per_level, arm)
    milliseconds = {f"{level:g}": round(1000 * took, 3) for level, took in per_level.items()}
    for seed, rate in runs:
        if (seed, rate) != runs[0]:
            if not experiment.fits(arm, rate, first=False):
                break
            began = time.monotonic()
        run.start_again(start, arm.plan(steps), seed)
        facts = {"arm": arm.name, "rate": rate, "asked_seconds": experiment.given.seconds, "steps": steps}
        facts |= {"ms_by_level": milliseconds} | tune_at(experiment, run, arm, steps, rate, results[seed])
        results[seed].save(run_name(arm, rate), facts | {"wall_seconds": round(time.monotonic() - began, 1)})
        print(f"{experiment.left:.0f} s left", flush=True)
    run.close()
    return all(run_name(arm, rate) in results[seed].runs for seed, rate in runs)


def tune_at(experiment: Experiment, run: Run, arm: Arm, steps: int, rate: float, results: Results) -> Facts:
    """Train an arm for so many steps at one rate, and judge it."""
    curve: list[tuple[int, float, float]] = []
    for part in range(VALIDATIONS):
        run.train(steps * (part + 1) // VALIDATIONS - run.step, rate)
        curve.append((run.step, run.seconds, run.validation_loss(experiment.held_out)))
    loss, file = curve[-1][2], results.path.with_name(f"{results.path.stem}-{run_name(arm, rate)}.npy")
    return {
        "seconds": run.seconds,
        "curve": curve,
        "val_loss": loss,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if experiment.device.type == "cuda" else None,
        "samples": experiment.look(run, arm.kind, file) if isfinite(loss) else {},
    }


def new_run(experiment: Experiment, arm: Arm, weights: Path | None = None, *, seed: int = 0) -> Run:
    """An arm before its first step."""
    return Run(
        experiment.network(arm.kind, weights),
        arm.plan(TIMED_STEPS),
        experiment.tuned,
        experiment.scale,
        dense=not arm.ratio,
        seed=seed,
        checkpointing=arm.checkpointing,
    )


def known_times(results: Mapping[int, Results], arm: Arm) -> dict[float, float] | None:
    """Seconds of a step at each level, as an earlier call measured them for this arm."""
    runs = (run for one in results.values() for run in one.runs.values())
    found = next((run["ms_by_level"] for run in runs if run.get("arm") == arm.name), None)
    return None if found is None else {float(level): took / 1000 for level, took in found.items()}


def rehearse(experiment: Experiment, arms: Sequence[Arm]) -> None:
    """Compile what each arm trains and samples with, for the cache that processes share; keeps nothing else."""
    for arm in arms:
        start = time.monotonic()
        run = new_run(experiment, arm)
        run.warm_up()
        run.close()
        labels = torch.tensor(TUNED).repeat(experiment.scale.sample_batch // len(TUNED))
        for scale in experiment.given.guidance:
            experiment.draw(experiment.sampler(arm.kind), labels, scale)
        print(f"{arm.name}: compiled in {time.monotonic() - start:.0f} s", flush=True)


def arms_of(given: argparse.Namespace) -> list[Arm]:
    """The arms by their names; `chosen` is a LoRA with the window that `choose` wrote."""
    return [chosen_arm(given.work) if name == CHOSEN else Arm.parse(name) for name in given.arms]


def chosen_arm(work: Path) -> Arm:
    """A LoRA with the tuner's window."""
    file = work / CHOSEN / CONFIG_FILE
    if not file.is_file():
        raise SystemExit(f"--arms {CHOSEN} needs {file}: run `choose` first")
    (route,) = RoutePlan.from_config(file).routes
    return Arm(kind="lora", ratio=route.selection_ratio, layers=(route.start_layer_idx, route.end_layer_idx))


def chosen_rates(arm: Arm, given: Sequence[str], results: Path | None) -> list[float]:
    """The rates of an arm: those given, or the one with the lowest validation loss in earlier results."""
    if list(given) != ["best"]:
        return [float(rate) for rate in given]
    if results is None:
        raise SystemExit("--rates best needs --chosen-by RESULTS.json")
    runs: dict[str, Any] = json.loads(results.read_text())["runs"]
    found = [run for run in runs.values() if run.get("arm") == arm.name]
    if not found:
        raise SystemExit(f"{results} has no run of {arm.name}: give --rates")
    return [min(found, key=loss_of)["rate"]]


def loss_of(run: Facts) -> float:
    """The validation loss of a run; infinite where it diverged."""
    return run["val_loss"] if isfinite(run["val_loss"]) else inf


def run_all(given: argparse.Namespace) -> bool:
    """Train what is not done yet; True when all is done, or was only planned or rehearsed."""
    rates = {arm: chosen_rates(arm, given.rates, given.chosen_by) for arm in arms_of(given)}
    wanted = {arm: [Tuned(seed, rate) for seed in given.seeds for rate in rates[arm]] for arm in rates}
    results = {seed: Results.of_seed(given.out, seed) for seed in given.seeds}
    missing = {arm: missing_runs(arm, runs, results) for arm, runs in wanted.items()}
    print(plan(given, wanted, missing), flush=True)
    if given.plan:
        return True
    experiment = Experiment(given)
    if given.rehearse:
        rehearse(experiment, list(wanted))
        return True
    base = train_base(experiment, Results(given.out, "base"), given.base_seconds)
    if base is None:
        return False
    return all(tune(experiment, arm, runs, results, base) for arm, runs in missing.items() if runs)
