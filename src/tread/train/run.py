"""A trained run, opened again: its model, and the images it draws.

A checkpoint says the shape of its samples and how many classes it knows, so the training data need not be there.
"""

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
from tread.routing.errors import ConfigError
from tread.sampling.generate import generate
from tread.sampling.grid import make_grid, save_images
from tread.sampling.solvers import Churn
from tread.train.checkpoint import CheckpointError, load_model, load_part, newest
from tread.train.config import PretrainConfig, from_run
from tread.train.loop import CHECKPOINTS
from tread.train.pretrain import build_model


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder holds, ready to sample from."""

    config: PretrainConfig
    model: DiT
    objective: Objective
    shape: tuple[int, int, int]
    num_classes: int
    step: int


def open_run(folder: Path, *, weights: str = "ema", device: torch.device | str = "cpu") -> Run:
    """The newest whole checkpoint of a run; `weights` is "ema" or "model"."""
    config = from_run(folder).config
    found = newest(folder / CHECKPOINTS)
    if found is None:
        raise CheckpointError(f"{folder} has no checkpoint yet; train it first.")
    path, manifest = found
    channels, height, width = manifest["shape"]
    model = build_model(config.model, (channels, height, width), manifest["num_classes"], checkpointing=False)
    load_model(model, load_part(path, weights), path)
    settings = dict(config.objective)
    return Run(
        config=config,
        model=model.to(device).eval(),
        objective=build_objective(settings.pop("name"), settings),
        shape=(channels, height, width),
        num_classes=manifest["num_classes"],
        step=manifest["step"],
    )


def parse_classes(text: str, num_classes: int) -> list[int]:
    """Labels from "0-9" or "1,5,7-8".

    >>> parse_classes("1,5,7-8", 10)
    [1, 5, 7, 8]
    """
    labels: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--classes is {text!r}; write labels and ranges, e.g. 0-9 or 1,5,207.")
        labels += range(int(first), int(last or first) + 1)
    for label in labels:
        if label >= num_classes:
            raise ConfigError(f"--classes names class {label}; this run knows classes 0-{num_classes - 1}.")
    return labels


def sample_run(
    run: Path,
    *,
    classes: str,
    per_class: int,
    guidance: float | None = None,
    interval: tuple[float, float] | None = None,
    steps: int | None = None,
    solver: str | None = None,
    churn: float | None = None,
    seed: int = 0,
    batch_size: int = 64,
    weights: str = "ema",
    vae: str | None = None,
    out: Path | None = None,
) -> Path:
    """Write PNGs and `grid.png`, one row per class; returns the grid's path. None means the run's own setting."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = open_run(run, weights=weights, device=device)
    defaults = opened.config.sample
    labels = [label for label in parse_classes(classes, opened.num_classes) for _ in range(per_class)]
    if not labels:
        raise ConfigError("nothing to draw: --per-class must be at least 1.")
    samples = generate(
        opened.model,
        opened.objective,
        torch.tensor(labels),
        shape=opened.shape,
        seed=seed,
        steps=defaults.steps if steps is None else steps,
        guidance=defaults.guidance if guidance is None else guidance,
        null_label=opened.num_classes,
        interval=defaults.bounds if interval is None else (interval[0], interval[1]),
        solver=solver or defaults.solver,
        churn=None if churn is None else Churn(s_churn=churn),
        batch_size=batch_size,
        device=device,
    )
    images = _decode(opened, samples, vae, batch_size)
    folder = run / "generated" if out is None else out
    save_images(images, labels, folder)
    grid = folder / "grid.png"
    make_grid(images, columns=per_class).save(grid)
    return grid


def _decode(run: Run, samples: Tensor, vae: str | None, batch_size: int) -> Tensor:
    """Samples (N, C, H, W) as the model sees them -> uint8 images."""
    data: dict[str, Any] = run.config.data
    if data["name"] != "latents":
        if vae is not None:
            raise ConfigError("--vae is given, but this run was trained on pixels; leave it out.")
        return DATASETS[data["name"]].to_images(samples)
    if vae is None:
        print("no --vae given: the pictures show the first latent channels, not images.")
        return DATASETS["latents"].to_images(samples)
    decoder = load_vae(vae)
    latents = VAES[data["vae"]].to_latent(samples).split(batch_size)
    return to_uint8(torch.cat([decoder.decode(part).cpu() for part in latents]))
