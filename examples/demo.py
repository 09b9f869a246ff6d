"""The demo: a small DiT on handwritten digits, dense and routed side by side.

- The two take turns, step by step, so that whatever else the machine does hits both alike; each turn goes to the
  one that has used less compute time, until both have used the same.
- Validation, sampling and drawing are not counted as compute.
- It reports what it measures: steps, losses at equal time and at equal steps, and how many of the generated digits
  a classifier fitted to the real ones reads as the digit that was asked for.

`make demo` runs it; `--seconds 60` shortens it, `--out` names another folder.
"""

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from tqdm import tqdm

from figures import Curve, save_curves, save_kept_tokens
from tread.data import Digits
from tread.pretrain.config import compose
from tread.pretrain.task import Pretraining
from tread.routing.cost import LayerShape, plan_cost
from tread.sampling.generate import generate
from tread.sampling.grid import make_grid
from tread.training.session import Session

VALIDATE_EVERY = 50  # steps
PER_CLASS = 16


@dataclass
class Arm:
    """One of the two runs and what was measured on it."""

    name: str
    task: Pretraining
    session: Session
    seconds: float = 0.0
    step: int = 0
    curve: list[tuple[float, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batches = self.task.batches(0)

    def train(self) -> None:
        """One step, timed."""
        start = time.perf_counter()
        self.session.step(self.step, self.batches)
        self.seconds += time.perf_counter() - start
        self.step += 1

    def validate(self) -> None:
        """Note the averaged model's loss on held-out digits, all tokens in all layers."""
        with self.session.averaged():
            self.curve.append((self.seconds, self.step, self.task.validate()["val_loss"]))

    def loss_at_step(self, step: int) -> float:
        """The loss after `step` steps, between the two nearest validations."""
        return float(np.interp(step, [s for _, s, _ in self.curve], [loss for _, _, loss in self.curve]))

    def seconds_to(self, loss: float) -> float | None:
        """The compute time at which the loss first was as low as `loss`."""
        points = [(0.0, 0, float("inf")), *self.curve]
        for (before, _, high), (after, _, low) in pairwise(points):
            if low <= loss:
                share = (high - loss) / (high - low) if high < float("inf") and high > low else 1.0
                return before + share * (after - before)
        return None


def make_arm(name: str, model: str, folder: Path, steps: int) -> Arm:
    """An arm with the trainer's own defaults."""
    config = compose([f"model={model}", f"train.steps={steps}", "log.trackers=none"])
    task = Pretraining(config, Accelerator(cpu=True), folder)
    return Arm(name, task, Session(task, config, task.accelerator))


def choose_threads(arm: Arm) -> None:
    """Let torch use as many threads as validate fastest: on a busy machine several would wait for each other."""
    arm.task.validate()  # the first one allocates memory
    taken: dict[int, float] = {}
    for threads in {min(4, os.cpu_count() or 1), 1}:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        arm.task.validate()
        taken[threads] = time.perf_counter() - start
    torch.set_num_threads(min(taken, key=lambda threads: taken[threads]))


def race(arms: list[Arm], seconds: float) -> None:
    """Train both arms until each has used `seconds` of compute."""
    for arm in arms:
        arm.train()  # the first step allocates memory; it is not counted
        arm.seconds = 0.0
    with tqdm(total=round(2 * seconds), unit="s", desc="training", bar_format="{l_bar}{bar}| {postfix}") as bar:
        while min(arm.seconds for arm in arms) < seconds:
            arm = min(arms, key=lambda arm: arm.seconds)
            arm.train()
            if arm.step % VALIDATE_EVERY == 0:
                arm.validate()
                bar.n = round(sum(arm.seconds for arm in arms))
                losses = ", ".join(f"{a.name} {a.step} steps, loss {a.curve[-1][2]:.4f}" for a in arms if a.curve)
                bar.set_postfix_str(losses)
    for arm in arms:
        arm.validate()


def draw(arm: Arm, labels: torch.Tensor) -> torch.Tensor:
    """Digits of the averaged model, (N, 1, 8, 8)."""
    sample = arm.task.config.sample
    with arm.session.averaged():
        return generate(
            arm.task.model,
            arm.task.objective,
            labels,
            shape=Digits.shape,
            seed=0,
            steps=20,
            guidance=sample.guidance,
            null_label=Digits.num_classes,
            batch_size=len(labels),
            device="cpu",
            progress=False,
        )


def readable_share(digits: Digits, samples: torch.Tensor, labels: torch.Tensor) -> float:
    """How many samples a classifier fitted to the real digits reads as the label asked for."""
    from sklearn.svm import SVC

    real = [digits[i] for i in range(len(digits))]
    classifier = SVC(C=10).fit([x.flatten().numpy() for x, _ in real], [label for _, label in real])
    read = classifier.predict(samples.clamp(-1, 1).flatten(1).numpy())
    return float((read == labels.numpy()).mean())


def table(dense: Arm, routed: Arm, shares: dict[str, float]) -> dict[str, dict[str, float | str | None]]:
    """Every row: what it is, dense, routed."""
    handle, model = routed.task.handle, routed.task.model
    assert handle is not None
    tokens = model.grid[0] * model.grid[1]
    ideal = plan_cost(handle.plan, LayerShape(width=model.width), tokens=tokens).speedup
    speed = {arm.name: arm.step / arm.seconds for arm in (dense, routed)}
    final = dense.curve[-1][2]
    reached = routed.seconds_to(final)
    return {
        "compute seconds": {"dense": dense.seconds, "routed": routed.seconds},
        "steps": {"dense": dense.step, "routed": routed.step},
        "steps/s": {**speed, "note": f"{speed['routed'] / speed['dense']:.2f}x, FLOPs allow {ideal:.2f}x"},
        "val loss, equal time": {"dense": final, "routed": routed.curve[-1][2]},
        f"val loss, {dense.step} steps": {"dense": final, "routed": routed.loss_at_step(dense.step)},
        "seconds to dense's final loss": {"dense": dense.seconds, "routed": reached},
        "digits read as asked": {name: 100 * share for name, share in shares.items()},
    }


def show(rows: dict[str, dict[str, float | str | None]]) -> str:
    """The rows as a Markdown table."""

    def cell(row: str, value: float | str | None) -> str:
        if value is None:
            return "not reached"
        if isinstance(value, str):
            return value
        if row.endswith("asked"):
            return f"{value:.0f} %"
        return f"{value:d}" if isinstance(value, int) else f"{value:.4f}" if "loss," in row else f"{value:.2f}"

    lines = ["| | dense | routed | |", "|---|---|---|---|"]
    for name, row in rows.items():
        cells = [cell(name, row.get(key, "")) for key in ("dense", "routed", "note")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def save_pictures(arms: list[Arm], samples: dict[str, torch.Tensor], digits: Digits, folder: Path) -> None:
    """Both sample grids, the loss curves, and the tokens that were kept."""
    for name, images in samples.items():
        make_grid(digits.to_images(images), columns=PER_CLASS).save(folder / f"samples-{name}.png")
    curves = {arm.name: Curve(seconds=s, steps=n, loss=v) for arm in arms for s, n, v in [zip(*arm.curve, strict=True)]}
    save_curves(curves, folder / "curves.png")
    routed = arms[1].task
    images = torch.stack([digits[i][0] for i in range(10)])  # (10, 1, 8, 8)
    selections = []
    assert routed.handle is not None
    for step in range(4):
        routed.handle.set_step(step)
        routed.model.train()(images, torch.full((10,), 500.0), torch.zeros(10, dtype=torch.int64))
        selections.append(routed.handle.selections[0])
    save_kept_tokens(digits.to_images(images), selections, routed.model.grid, folder / "kept-tokens.png")


def main() -> None:
    """Race, measure, draw."""
    parser = argparse.ArgumentParser(description="A small DiT on handwritten digits, dense and routed side by side.")
    parser.add_argument("--seconds", type=float, default=100, help="compute time per arm (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="(default: %(default)s)")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)

    print(f"Training a small DiT on handwritten digits, dense and routed, {options.seconds:.0f} s of compute each.")
    arms = [make_arm(name, model, options.out, 1_000_000) for name, model in (("dense", "dit"), ("routed", "tread"))]
    choose_threads(arms[0])
    race(arms, options.seconds)

    digits = Digits()
    labels = torch.arange(10).repeat_interleave(PER_CLASS)
    samples = {arm.name: draw(arm, labels) for arm in tqdm(arms, desc="sampling", unit="grid")}
    shares = {name: readable_share(digits, images, labels) for name, images in samples.items()}
    rows = table(arms[0], arms[1], shares)
    save_pictures(arms, samples, digits, options.out)
    text = show(rows)
    (options.out / "table.md").write_text(text + "\n")
    (options.out / "table.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    print(f"\n{text}\n")
    for file in ("samples-dense.png", "samples-routed.png", "curves.png", "kept-tokens.png", "table.md"):
        print(f"  {options.out / file}")


if __name__ == "__main__":
    main()
