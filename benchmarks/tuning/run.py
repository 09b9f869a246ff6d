"""The runs of one seed: the base, then each arm at each rate, and what is seen of them.

- The base goes on where an earlier call stopped; an arm that would not fit into the time that is left is not begun.
- Results are one JSON file that is whole after every run; samples of each run are kept as a grid.
- A rehearsal compiles what the arms will run, beside the base: its clock is nobody's.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.common.record import Facts, machine, write_json
from benchmarks.quality.judge import extract, gaussian, load_judge_network, spread
from tread.data.dataset import to_uint8
from tread.evaluate.features import Extractor
from tread.evaluate.frechet import frechet_distance
from tread.evaluate.metrics import kernel_distance
from tread.files import atomic_write
from tread.sampling.generate import generate
from tread.sampling.grid import make_grid
from tread.training.optimizers.ema import EMA

from .arms import BY_NAME, CLASSES, SCALES, TUNED, Arm, Kind
from .model import FluxOfClasses, add_lora, caption_table
from .plan import BASE_SECONDS, missing_rates, plan, run_name, run_seconds
from .training import OBJECTIVE, Images, Run, steps_within

GUIDANCE = (1.0, 1.5)
CHUNK = 50
"""Steps of the base between two looks at the clock."""
REPORT_SECONDS = 60.0
"""Training of the base between two losses; what it has so far is written then."""
VALIDATIONS = 4
SHOWN = 8
"""Samples of each class in the picture of the base."""


class Experiment:
    """Everything that the runs of a seed share."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.work: Path = given.work
        self.seed: int = given.seed
        self.scale = SCALES["smoke" if given.smoke else "full"]
        self.device = torch.device("cuda" if torch.cuda.is_available() and not given.smoke else "cpu")
        self.ends = time.monotonic() + given.budget_seconds
        # all runs of a seed compile the same layers in one process; beyond the limit they would silently run eager
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 4096
        self.path = results_file(given)
        self.captions = caption_table(self.work, smoke=given.smoke).to(self.device)
        self.trained, self.tuned, self.held_out = (
            Images.of(self.work / "data", split, tuned=tuned, scale=self.scale, device=self.device)
            for split, tuned in (("train", False), ("train", True), ("test", True))
        )
        self._compiled: dict[Kind, FluxOfClasses] = {}
        self.facts = read_facts(self.path)
        self.facts |= {"seed": self.seed, "machine": machine(), "command": " ".join(sys.argv[1:])}

    @property
    def runs(self) -> dict[str, Facts]:
        """The runs that are done."""
        return self.facts["runs"]

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.ends - time.monotonic()

    def fits(self, arm: Arm, rate: float, *, first: bool) -> bool:
        """Whether a run may begin; says so where it may not."""
        needed = run_seconds(arm, self.given, first=first)
        if self.left >= needed or self.given.smoke:
            return True
        print(f"{run_name(arm.name, rate)}: needs {needed:.0f} s, {self.left:.0f} left", flush=True)
        return False

    @cached_property
    def extractor(self) -> Extractor:
        """The network that judges samples."""
        return load_judge_network(self.work, self.device, smoke=self.given.smoke)

    @cached_property
    def reference(self) -> np.ndarray:
        """Features of the test images of the tuned classes."""
        return extract(self.extractor, self.held_out.pixels.permute(0, 2, 3, 1).cpu().numpy())

    def network(self) -> FluxOfClasses:
        """Fresh weights."""
        return FluxOfClasses(self.scale, self.captions, seed=self.seed).to(self.device)

    def save(self, name: str, facts: Facts) -> None:
        """Put a run down."""
        self.runs[name] = facts
        write_json(self.path, self.facts)
        told = {key: facts[key] for key in facts if key not in ("samples", "curve")}
        print(f"{name} {json.dumps(told)}; {self.left:.0f} s left", flush=True)

    def look(self, run: Run, arm: Arm, name: str) -> Facts:
        """Distances of samples of the tuned classes to their test images, unguided and guided."""
        net = self._compiled[arm.kind] = self._compiled.get(arm.kind) or self._compile(arm)
        net.load_state_dict(run.net.state_dict())
        return {f"{scale:g}": self._distances(net, name, scale) for scale in GUIDANCE}

    def _compile(self, arm: Arm) -> FluxOfClasses:
        """A network to sample from: the layers of one in training are compiled and captured for that alone."""
        net = self.network()
        prepare(self, net, arm)
        if self.scale.compile:
            net.transformer.compile_repeated_blocks()
        return net

    def _distances(self, net: FluxOfClasses, name: str, guidance: float) -> Facts:
        labels = torch.tensor(TUNED).repeat(self.scale.samples // len(TUNED))
        pixels = self.draw(net, labels, guidance)
        np.save(self.path.with_name(f"{self.path.stem}-{name}-{guidance:g}.npy"), pixels[:64])
        return distances(extract(self.extractor, pixels), self.reference, self.extractor)

    def draw(self, net: FluxOfClasses, labels: Tensor, guidance: float) -> np.ndarray:
        """uint8 samples of some classes, (N, H, W, 3)."""
        scale = self.scale
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            images = generate(
                net.eval(),
                OBJECTIVE,
                labels,
                shape=(3, scale.side, scale.side),
                seed=0,
                steps=scale.solver_steps,
                guidance=guidance,
                null_label=len(CLASSES),
                batch_size=scale.sample_batch if guidance == 1 else scale.sample_batch // 2,
                device=self.device,
                progress=False,
            )
        return to_uint8(images).cpu().numpy()

    def show_base(self, run: Run) -> None:
        """A picture of what the base draws, a row for each class; the tuned ones it cannot know."""
        images = self.draw(run.net, torch.arange(len(CLASSES)).repeat_interleave(SHOWN), GUIDANCE[-1])
        run.net.train()
        picture = make_grid(torch.from_numpy(images), columns=SHOWN)
        Image.fromarray(np.asarray(picture)).save(self.path.with_name(f"{self.path.stem}-base.png"))


def results_file(given: argparse.Namespace) -> Path:
    """Where the results of a seed are."""
    return given.out / f"tuning-s{given.seed}.json"


def read_facts(path: Path) -> Facts:
    """The results so far."""
    return json.loads(path.read_text()) if path.is_file() else {"runs": {}}


def distances(features: np.ndarray, reference: np.ndarray, extractor: Extractor) -> Facts:
    """The Frechet and the kernel distance between two sets of features."""
    ours, theirs = (torch.from_numpy(spread(one, 2000)).to(extractor.device) for one in (features, reference))
    return {
        extractor.distance: frechet_distance(*gaussian(features), *gaussian(reference)),
        f"KD-{extractor.name}": kernel_distance(ours, theirs)[0],
    }


def train_base(experiment: Experiment, seconds: float) -> Path | None:
    """The base's averaged weights; None where the time was over before so many seconds of training."""
    done, going_on = (experiment.work / f"base-s{experiment.seed}.{ending}" for ending in ("pt", "unfinished.pt"))
    if done.is_file():
        return done
    net = experiment.network()
    run = Run(
        net, BY_NAME["full-dense"].plan(1), experiment.trained, experiment.scale, dense=True, seed=experiment.seed
    )
    average = EMA(net, decay=0.9995, warmup=10)
    run.warm_up()
    curve: list[tuple[int, float, float]] = []
    if going_on.is_file():
        state = torch.load(going_on, weights_only=True, map_location=experiment.device)
        net.load_state_dict(state["net"])
        run.optimizer.load_state_dict(state["optimizer"])
        average.averages = state["averages"]
        run.step, run.seconds, curve = state["step"], state["seconds"], state["curve"]

    def write() -> None:
        state = {"net": net.state_dict(), "optimizer": run.optimizer.state_dict(), "averages": average.averages}
        save_whole(state | {"step": run.step, "seconds": run.seconds, "curve": curve}, going_on)

    told = run.seconds
    while run.seconds < seconds and experiment.left > BASE_SECONDS:
        run.train(CHUNK if experiment.scale.compile else 2, experiment.scale.base_rate, average.update)
        if run.seconds - told >= REPORT_SECONDS:
            told = run.seconds
            with average.applied():
                curve.append((run.step, run.seconds, run.validation_loss(experiment.held_out)))
            print(f"base: {run.step} steps in {run.seconds:.0f} s, loss {curve[-1][2]:.5f}", flush=True)
            write()
    if run.seconds < seconds:
        write()
        print(f"base: {run.seconds:.0f} of {seconds:.0f} s; {experiment.left:.0f} s left", flush=True)
        return None
    with average.applied():
        facts = {"steps": run.step, "seconds": run.seconds, "parameters": sum(p.numel() for p in net.parameters())}
        facts |= {"val_loss": run.validation_loss(experiment.held_out), "curve": curve, "samples": {}}
        experiment.show_base(run)
        experiment.save("base", facts)
        save_whole(net.state_dict(), done)
    run.close()
    going_on.unlink(missing_ok=True)
    return done


def save_whole(state: Facts, path: Path) -> None:
    """Write a file that is whole or not there, whenever the process is killed."""
    with atomic_write(path) as file:
        torch.save(state, file)


def tune(experiment: Experiment, arm: Arm, rates: Sequence[float], base: Path) -> bool:
    """One arm at each of its rates, by the clock; False where the time was over before the last.

    The rates share what was compiled and captured: the weights are put back between them.
    """
    began, seconds = time.monotonic(), experiment.given.seconds
    if not experiment.fits(arm, rates[0], first=True):
        return False
    if experiment.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    net = experiment.network()
    net.load_state_dict(torch.load(base, weights_only=True, map_location=experiment.device))
    prepare(experiment, net, arm)
    per_level = known_times(experiment.runs, arm) or timed(experiment, net, arm)
    steps = steps_within(seconds, per_level, arm)
    run = _run(experiment, net, arm, steps=steps)
    start = [parameter.detach().clone() for parameter in run.parameters]
    run.warm_up()
    for rate in rates:
        if rate != rates[0]:
            if not experiment.fits(arm, rate, first=False):
                break
            began = time.monotonic()
            run.start_again(start)
        facts = {"arm": arm.name, "rate": rate, "asked_seconds": seconds, "steps": steps}
        facts["ms_by_level"] = {f"{level:g}": round(1000 * took, 3) for level, took in per_level.items()}
        facts |= tune_at(experiment, run, arm, steps, rate)
        experiment.save(run_name(arm.name, rate), facts | {"wall_seconds": round(time.monotonic() - began, 1)})
    run.close()
    return not missing_rates(arm.name, rates, experiment.runs)


def tune_at(experiment: Experiment, run: Run, arm: Arm, steps: int, rate: float) -> Facts:
    """Train an arm for so many steps at one rate, and judge it."""
    curve: list[tuple[int, float, float]] = []
    for part in range(VALIDATIONS):
        run.train(steps * (part + 1) // VALIDATIONS - run.step, rate)
        curve.append((run.step, run.seconds, run.validation_loss(experiment.held_out)))
    loss, name = curve[-1][2], run_name(arm.name, rate)
    return {
        "seconds": run.seconds,
        "curve": curve,
        "val_loss": loss,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if experiment.device.type == "cuda" else None,
        "samples": experiment.look(run, arm, name) if experiment.given.samples and isfinite(loss) else {},
    }


def prepare(experiment: Experiment, net: FluxOfClasses, arm: Arm) -> None:
    """Put an adapter on, where the arm has one."""
    if arm.kind == "lora":
        add_lora(net, experiment.scale.rank)


def known_times(runs: dict[str, Facts], arm: Arm) -> dict[float, float] | None:
    """Seconds of a step at each level, as they were before this arm's first rate."""
    found = next((run["ms_by_level"] for run in runs.values() if run.get("arm") == arm.name), None)
    return None if found is None else {float(level): took / 1000 for level, took in found.items()}


def timed(experiment: Experiment, net: FluxOfClasses, arm: Arm) -> dict[float, float]:
    """The same, measured."""
    run = _run(experiment, net, arm, steps=1000)
    found = run.seconds_by_scale()
    run.close()
    return found


def _run(experiment: Experiment, net: FluxOfClasses, arm: Arm, *, steps: int) -> Run:
    plan, scale = arm.plan(steps), experiment.scale
    return Run(net, plan, experiment.tuned, scale, dense=not arm.ratio, seed=experiment.seed)


def rehearse(experiment: Experiment, arms: Sequence[Arm]) -> None:
    """Compile what each arm runs, for the cache that processes share; nothing is put down."""
    for arm in arms:
        start = time.monotonic()
        net = experiment.network()
        prepare(experiment, net, arm)
        run = _run(experiment, net, arm, steps=1000)
        run.warm_up()
        run.close()
        print(f"{arm.name}: compiled in {time.monotonic() - start:.0f} s", flush=True)


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
    rates_of = {name: chosen_rates(BY_NAME[name], given.rates, given.chosen_by) for name in given.arms}
    print(plan(given, rates_of, read_facts(results_file(given))["runs"]), flush=True)
    if given.plan:
        return True
    experiment = Experiment(given)
    if given.rehearse:
        rehearse(experiment, [BY_NAME[name] for name in given.arms])
        return True
    base = given.base or train_base(experiment, given.base_seconds)
    if base is None:
        return False
    for name, rates in rates_of.items():
        missing = missing_rates(name, rates, experiment.runs)
        if missing and not tune(experiment, BY_NAME[name], missing, base):
            return False
    return True
