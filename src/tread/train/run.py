"""A trained run, opened again: its model, and the images it draws.

A checkpoint says the shape of its samples and how many classes it knows, so the training data need not be there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread.data import DATASETS
from tread.data.base import to_uint8
from tread.data.latents import VAES
from tread.data.vae import load_vae
from tread.models import DiT
from tread.objectives import Objective
from tread.objectives import build as build_objective
from tread.routing.errors import ConfigError, check_int
from tread.routing.plan import RoutePlan
from tread.sampling.generate import flops_per_sample, generate
from tread.sampling.grid import make_grid, save_images
from tread.sampling.guidance import Branches
from tread.sampling.solvers import Churn
from tread.train.checkpoint import (
    MANIFEST,
    CheckpointError,
    load_part,
    load_tensors,
    newest,
    read_manifest,
    trained,
)
from tread.train.config import from_run
from tread.train.loop import CHECKPOINTS
from tread.train.pretrain import build_model
from tread.train.settings import PretrainConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder holds, ready to sample from."""

    config: PretrainConfig
    model: DiT
    objective: Objective
    shape: tuple[int, int, int]
    num_classes: int
    step: int
    plan: RoutePlan | None
    """The routes it was trained with; the model comes dense."""


def open_run(folder: Path, *, weights: str = "ema", device: torch.device | str = "cpu") -> Run:
    """The newest whole checkpoint of a run, or one checkpoint by its own folder; `weights` is "ema" or "model"."""
    chosen = (folder / MANIFEST).is_file()
    run = folder.resolve().parents[1] if chosen else folder
    config = from_run(run).config
    found = (folder, read_manifest(folder)) if chosen else newest(run / CHECKPOINTS)
    if found is None:
        raise CheckpointError(f"{folder} has no checkpoint yet; train it first.")
    path, manifest = found
    channels, height, width = manifest["shape"]
    model = build_model(config.model, (channels, height, width), manifest["num_classes"], checkpointing=False)
    load_tensors(trained(model), load_part(path, weights), path)
    settings = dict(config.objective)
    return Run(
        config=config,
        model=model.to(device).eval(),
        objective=build_objective(settings.pop("name"), settings),
        shape=(channels, height, width),
        num_classes=manifest["num_classes"],
        step=manifest["step"],
        plan=None if manifest["tread_config"] is None else RoutePlan.from_config(manifest["tread_config"]),
    )


def parse_classes(text: str, num_classes: int) -> list[int]:
    """Labels from "0-9" or "1,5,7-8".

    >>> parse_classes("1,5,7-8", 10)
    [1, 5, 7, 8]
    """
    labels: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) > int(last or first):
            raise ConfigError(f"--classes is {text!r}; write labels and ranges, e.g. 0-9 or 1,5,207.")
        if int(last or first) >= num_classes:
            raise ConfigError(f"--classes names class {last or first}; this run knows classes 0-{num_classes - 1}.")
        labels += range(int(first), int(last or first) + 1)
    return labels


def sample_run(
    run: Path,
    *,
    classes: str | None = None,
    per_class: int,
    guidance: float | None = None,
    interval: tuple[float, float] | None = None,
    guidance_kind: str = "cfg",
    strong_ratio: float = 0.0,
    weak_ratio: float | None = None,
    ratio_schedule: str = "constant",
    weak: Path | None = None,
    steps: int | None = None,
    solver: str | None = None,
    churn: float | None = None,
    seed: int = 0,
    batch_size: int = 64,
    weights: str = "ema",
    vae: str | None = None,
    out: Path | None = None,
) -> Path:
    """Write PNGs and `grid.png`, one row per class, and say what a sample costs; returns the grid's path.

    None means the run's own setting, and the first ten classes. `weak` is a run or a checkpoint for the guidance kinds
    `ag` and `ag+sg`; the ratios are those of `guidance.Branches`. Everything that can be refused is refused before the
    first sample is drawn.
    """
    check_int(per_class, "--per-class", 1)
    branches = Branches(kind=guidance_kind, strong_ratio=strong_ratio, weak_ratio=weak_ratio, schedule=ratio_schedule)
    if branches.needs_weak != (weak is not None):
        raise ConfigError(
            f"--guidance-kind {guidance_kind} "
            + ("needs --weak: an earlier checkpoint." if weak is None else "has no use for --weak; leave it out.")
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = open_run(run, weights=weights, device=device)
    lesser = None if weak is None else open_run(weak, weights=weights, device=device)
    if lesser is not None:
        _check_same_task(opened, lesser)
    if branches.needs_routes:
        for each in (opened, lesser):
            _route(each)
    defaults = opened.config.sample
    chosen = range(min(10, opened.num_classes)) if classes is None else parse_classes(classes, opened.num_classes)
    labels = [label for label in chosen for _ in range(per_class)]
    decode = _decoder(opened, vae, batch_size)
    folder = run / "generated" if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {str(folder)!r}: {error.strerror}. Name another folder with --out."
        ) from None
    settings: dict[str, Any] = {
        "shape": opened.shape,
        "seed": seed,
        "steps": defaults.steps if steps is None else steps,
        "guidance": defaults.guidance if guidance is None else guidance,
        "null_label": opened.num_classes,
        "interval": defaults.bounds if interval is None else (interval[0], interval[1]),
        "branches": branches,
        "weak": None if lesser is None else lesser.model,
        "solver": solver or defaults.solver,
        "churn": None if churn is None else Churn(s_churn=churn),
    }
    flops = flops_per_sample(opened.model, opened.objective, **settings)
    print(f"{flops / 1e9:.4g} GFLOPs a sample: {guidance_kind} {settings['guidance']:g}, {settings['steps']} steps")
    samples = generate(
        opened.model, opened.objective, torch.tensor(labels), **settings, batch_size=batch_size, device=device
    )
    images = decode(samples)
    save_images(images, labels, folder)
    grid = folder / "grid.png"
    make_grid(images, columns=per_class).save(grid)
    return grid


def _check_same_task(run: Run, weak: Run) -> None:
    for what, own, other in (
        ("samples of shape", run.shape, weak.shape),
        ("classes", run.num_classes, weak.num_classes),
        ("objective", run.config.objective, weak.config.objective),
    ):
        if own != other:
            raise ConfigError(f"--weak was trained for another task: {what} {other} there, {own} here.")


def _route(run: Run | None) -> None:
    """Put the routes a run was trained with on its model."""
    if run is None:
        return
    if run.plan is None:
        raise ConfigError(
            "guidance is to drop tokens, but a run was trained without routes; choose --guidance-kind cfg or ag with "
            "--strong-ratio 0, or a run of model=tread."
        )
    run.model.route(run.plan)


def _decoder(run: Run, vae: str | None, batch_size: int) -> Callable[[Tensor], Tensor]:
    """The function from samples (N, C, H, W) as the model sees them to uint8 images (N, H, W, 3 or 1)."""
    data: dict[str, Any] = run.config.data
    if data["name"] != "latents" and vae is not None:
        raise ConfigError("--vae is given, but this run was trained on pixels; leave it out.")
    if vae is None:
        if data["name"] == "latents":
            print("no --vae given: the pictures show the first latent channels, not images.")
        return DATASETS[data["name"]].to_images
    decoder = load_vae(vae)
    channels = decoder.model.config.latent_channels
    if channels != run.shape[0]:
        raise ConfigError(
            f"--vae {vae} has {channels} latent channels and this run {run.shape[0]}; give the run's VAE."
        )

    def decode(samples: Tensor) -> Tensor:
        latents = VAES[data["vae"]].to_latent(samples).split(batch_size)
        return to_uint8(torch.cat([decoder.decode(part).cpu() for part in latents]))

    return decode
