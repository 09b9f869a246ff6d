"""The runs of one seed: the base, then each arm at each rate, and what is seen of them.

- The base goes on where an earlier call stopped; an arm that would not fit into the time that is left is not begun.
- Results are one JSON file that is whole after every run; samples of each run are kept as a grid.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.quality.judge import extract, gaussian, load_judge_network, spread
from benchmarks.record import Facts, machine, write_json
from tread.data.dataset import to_uint8
from tread.evaluate.features import Extractor
from tread.evaluate.frechet import frechet_distance
from tread.evaluate.metrics import kernel_distance
from tread.finetune.families.flux import Flux
from tread.sampling.generate import generate
from tread.training.ema import EMA

from .arms import BY_NAME, CLASSES, SCALES, TUNED, Arm
from .model import FluxOfClasses, add_lora, random_captions
from .training import OBJECTIVE, Images, Run, steps_within

GUIDANCE = (1.0, 1.5)
CHUNK = 50
"""Steps of the base between two looks at the clock."""
LOOK_SECONDS = 45.0
"""What an arm takes beside its training: compiling from the cache, validation and samples."""
VALIDATIONS = 4


class Experiment:
    """Everything that the runs of a seed share."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.work: Path = given.work
        self.seed: int = given.seed
        self.scale = SCALES["smoke" if given.smoke else "full"]
        self.device = torch.device("cuda" if torch.cuda.is_available() and not given.smoke else "cpu")
        self.ends = time.monotonic() + given.budget_seconds
        self.path: Path = given.out / f"tuning-s{self.seed}.json"
        file = self.work / "captions.safetensors"
        captions = random_captions() if given.smoke else load_file(file)["captions"]
        self.captions = captions.to(self.device)
        self.extractor = load_judge_network(self.work, self.device, smoke=given.smoke)
        self.trained, self.tuned, self.held_out = (
            Images.of(self.work / "data", split, tuned=tuned, scale=self.scale, device=self.device)
            for split, tuned in (("train", False), ("train", True), ("test", True))
        )
        self.facts: Facts = json.loads(self.path.read_text()) if self.path.is_file() else {"runs": {}}
        self.facts |= {"seed": self.seed, "machine": machine(), "command": " ".join(sys.argv[1:])}
        self.reference = self._features(self.held_out.pixels)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.ends - time.monotonic()

    def _features(self, pixels: torch.Tensor) -> np.ndarray:
        return extract(self.extractor, pixels.permute(0, 2, 3, 1).cpu().numpy())

    def network(self) -> FluxOfClasses:
        """Fresh weights."""
        return FluxOfClasses(self.scale, self.captions, seed=self.seed).to(self.device)

    def save(self, name: str, facts: Facts) -> None:
        """Put a run down."""
        self.facts["runs"][name] = facts
        write_json(self.path, self.facts)
        print(name, json.dumps({key: facts[key] for key in facts if key not in ("samples", "curve")}), flush=True)

    def look(self, run: Run, name: str) -> Facts:
        """Distances of samples of the tuned classes to their test images, unguided and guided."""
        found = {f"{scale:g}": self._distances(run, name, scale) for scale in GUIDANCE}
        run.net.train()
        return found

    def _distances(self, run: Run, name: str, guidance: float) -> Facts:
        scale = self.scale
        labels = torch.tensor(TUNED).repeat(scale.samples // len(TUNED))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            images = generate(
                run.net,
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
        pixels = to_uint8(images)  # (N, H, W, 3)
        np.save(self.path.with_name(f"{self.path.stem}-{name}-{guidance:g}.npy"), pixels[:64].cpu().numpy())
        features = extract(self.extractor, pixels.cpu().numpy())
        return distances(features, self.reference, self.extractor)


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
    run.seconds_by_scale()
    if going_on.is_file():
        state = torch.load(going_on, weights_only=True, map_location=experiment.device)
        net.load_state_dict(state["net"])
        run.optimizer.load_state_dict(state["optimizer"])
        average.averages = state["averages"]
        run.step, run.seconds = state["step"], state["seconds"]
    while run.seconds < seconds and experiment.left > LOOK_SECONDS:
        run.train(CHUNK if experiment.scale.compile else 2, experiment.scale.base_rate, average.update)
    if run.seconds < seconds:
        state = {"net": net.state_dict(), "optimizer": run.optimizer.state_dict(), "averages": average.averages}
        torch.save(state | {"step": run.step, "seconds": run.seconds}, going_on)
        return None
    with average.applied():
        facts = {"steps": run.step, "seconds": run.seconds, "parameters": sum(p.numel() for p in net.parameters())}
        facts |= {"val_loss": run.validation_loss(experiment.held_out), "samples": experiment.look(run, "base")}
        torch.save(net.state_dict(), done)
    run.close()
    experiment.save("base", facts)
    return done


def tune(experiment: Experiment, arm: Arm, rate: float, seconds: float, base: Path, name: str) -> None:
    """One arm at one rate, by the clock."""
    net = experiment.network()
    net.load_state_dict(torch.load(base, weights_only=True, map_location=experiment.device))
    if arm.kind == "lora":
        add_lora(net, experiment.scale.rank, Flux.lora_targets)
    timed = _run(experiment, net, arm, steps=1000)
    per_level = timed.seconds_by_scale()
    steps = steps_within(seconds, per_level, arm)
    timed.close()
    run = _run(experiment, net, arm, steps=steps)
    run.seconds_by_scale()  # capture the graphs of this handle
    curve: list[tuple[int, float, float]] = []
    for part in range(VALIDATIONS):
        run.train(steps * (part + 1) // VALIDATIONS - run.step, rate)
        curve.append((run.step, run.seconds, run.validation_loss(experiment.held_out)))
    facts: Facts = {
        "arm": arm.name,
        "rate": rate,
        "asked_seconds": seconds,
        "seconds": run.seconds,
        "steps": steps,
        "ms_by_level": {f"{level:g}": round(1000 * took, 3) for level, took in per_level.items()},
        "curve": curve,
        "val_loss": curve[-1][2],
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if experiment.device.type == "cuda" else None,
        "samples": experiment.look(run, name),
    }
    run.close()
    experiment.save(name, facts)


def _run(experiment: Experiment, net: FluxOfClasses, arm: Arm, *, steps: int) -> Run:
    plan, scale = arm.plan(steps), experiment.scale
    return Run(net, plan, experiment.tuned, scale, dense=not arm.ratio, seed=experiment.seed)


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
    return [min(found, key=lambda run: run["val_loss"])["rate"]]


def run_all(given: argparse.Namespace) -> bool:
    """Train what is not done yet; True when all is done."""
    experiment = Experiment(given)
    base = train_base(experiment, given.base_seconds)
    if base is None:
        return False
    jobs = [
        (BY_NAME[name], rate)
        for name in given.arms
        for rate in chosen_rates(BY_NAME[name], given.rates, given.chosen_by)
    ]
    for arm, rate in jobs:
        name = f"{arm.name}-{rate:g}"
        if name in experiment.facts["runs"]:
            continue
        if experiment.left < given.seconds + LOOK_SECONDS and not given.smoke:
            print(f"{name}: {experiment.left:.0f} s are left", flush=True)
            return False
        tune(experiment, arm, rate, given.seconds, base, name)
    return True
