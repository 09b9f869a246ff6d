"""`tread sample`: a trained run opened again, and the images that its model draws.

A checkpoint records the shape of its samples and the number of classes, so the training data is not needed.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tread.errors import CheckpointError, ConfigError, TreadWarning, check_int, shown
from tread.files import is_file
from tread.models import DiT
from tread.objectives import Objective
from tread.objectives.objective import check_number
from tread.pretrain.build import build_model, build_objective
from tread.pretrain.config import from_run
from tread.pretrain.decode import make_decode
from tread.pretrain.settings import PretrainConfig, SampleConfig
from tread.routing.plan import RoutePlan
from tread.sampling.generate import flops_per_sample, generate
from tread.sampling.grid import image_names, make_grid, save_images
from tread.sampling.guidance.fields import check_interval
from tread.training.checkpoint import CHECKPOINTS, MANIFEST, newest, read_whole
from tread.training.parts import load_into, trained
from tread.words import counted

GRID_ROWS, GRID_COLUMNS = 20, 10
PER_CLASS, MOST_SEEDS = 8, 10_000_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder's checkpoint, ready to sample from."""

    config: PretrainConfig
    model: DiT
    objective: Objective
    shape: tuple[int, int, int]
    num_classes: int
    classes: list[str]
    """The names of the classes; empty if the data had none."""
    step: int
    plan: RoutePlan | None
    """The routes it was trained with; the model comes dense."""


def open_run(folder: Path, *, averaged: bool = True, device: torch.device | str = "cpu") -> Run:
    """The newest whole checkpoint of a run, or one checkpoint by its own folder; `averaged`: with its EMA weights."""
    if is_file(folder):
        raise ConfigError(
            f"{shown(str(folder), 150)} is a file of weights; images are drawn from a run, which knows its objective: "
            "`tread train model=dit model.size=XL/2 model.weights=FILE data=latents data.path=SHARDS` trains on from "
            "those of facebookresearch/DiT, and diffusers' DiTPipeline draws with them as they are."
        )
    chosen = (folder / MANIFEST).is_file()
    run = folder.resolve().parents[1] if chosen else folder
    config = from_run(run)
    opened = (folder, read_whole(folder)) if chosen else newest(run / CHECKPOINTS)
    if opened is None:
        fix = "train it again with another checkpoint.every, for 0 saves none" if config.checkpoint.every == 0 else ""
        raise CheckpointError(f"{folder} has no checkpoint yet; {fix or 'train it first'}.")
    path, manifest = opened
    channels, height, width = manifest["shape"]
    model = build_model(config.model, (channels, height, width), manifest["num_classes"], checkpointing=False)
    part = "ema" if averaged else "model"
    weights = trained(model)
    load_into(weights, path, part)
    if odd := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"{path / part}.safetensors has NaN or infinite weights ({counted(len(odd), 'tensor')}, the first is "
            f"{odd[0]}), so it draws nothing: name an earlier checkpoint's folder in {run / CHECKPOINTS}, or train "
            "again."
        )
    return Run(
        config=config,
        model=model.to(device).eval(),
        objective=build_objective(config.objective),
        shape=(channels, height, width),
        num_classes=manifest["num_classes"],
        classes=manifest.get("classes", []),
        step=manifest["step"],
        plan=None if manifest["tread_config"] is None else RoutePlan.from_config(manifest["tread_config"]),
    )


def parse_classes(text: str, num_classes: int, names: Sequence[str] = ()) -> list[int]:
    """Labels from "0-9", "1,5,7-8" or names of classes; a whole number is always a label.

    >>> parse_classes("1,5,7-8", 10)
    [1, 5, 7, 8]
    >>> parse_classes("dog,0", 2, ["cat", "dog"])
    [1, 0]
    """
    labels: list[int] = []
    for part in text.split(","):
        if part.strip() in names and not part.strip().isdecimal():
            labels.append(list(names).index(part.strip()))
            continue
        span = _range(part)
        if span is None:
            known = f", or names of classes: {', '.join(names[:20])}" if names else ""
            raise ConfigError(f"--classes is {shown(text)}; write labels and ranges, e.g. 0-9 or 1,5,207{known}.")
        if span[-1] >= num_classes:
            raise ConfigError(f"--classes names class {span[-1]}; this run knows classes 0-{num_classes - 1}.")
        labels += span
    return labels


def parse_seeds(text: str) -> list[int]:
    """Seeds from "0-49999" or "1,5,7-8", each once.

    >>> parse_seeds("1,5,7-8,5")
    [1, 5, 7, 8]
    """
    seeds: dict[int, None] = {}
    for part in text.split(","):
        span = _range(part)
        if span is None:
            raise ConfigError(f"--seeds is {shown(text)}; write seeds and ranges, e.g. 0-49999 or 1,5,7-8.")
        if span[-1] >= 2**32 or len(seeds) + len(span) > MOST_SEEDS:
            raise ConfigError(f"--seeds is {shown(text)}; allowed are at most {MOST_SEEDS:,} seeds, all below 2^32.")
        seeds |= dict.fromkeys(span)
    return list(seeds)


def _range(text: str) -> range | None:
    """The numbers of "7" or "7-9"; None for any other text."""
    first, dash, last = text.strip().partition("-")
    if len(text) > 40 or not first.isdecimal() or (dash and not last.isdecimal()):
        return None
    return range(int(first), int(last or first) + 1) or None


def sample_run(
    run: Path,
    *,
    classes: str | None = None,
    per_class: int | None = None,
    weak: Path | None = None,
    seed: int | None = None,
    seeds: str | None = None,
    batch_size: int = 64,
    averaged: bool = True,
    precision: str | None = None,
    vae: str | None = None,
    out: Path | None = None,
    **settings: Any,
) -> Path:
    """Write PNGs, batch by batch, and `grid.png`, one row per class, and say what a sample costs; returns its path.

    `settings` are those of `SampleConfig`, and other guidance kinds; None means the run's own. By default these are the
    first ten classes, 8 images of each and the seed 0. With `seeds` there is one image per seed instead, named by it,
    of the class `classes[seed % len(classes)]`, by default of all classes: what that `seed` draws first. `weak` is a
    run or a checkpoint for the guidance kinds `ag` and `ag+sg`; `precision`, bf16 or float32, is by default what the
    run trained in. Everything that can be refused is refused before the first sample is drawn.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    _check_options(given, per_class, batch_size, seed, seeds)
    drawn = None if seeds is None else parse_seeds(seeds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = open_run(run, averaged=averaged, device=device)
    sample = _replaced(opened.config.sample, given, seed or 0)
    branches = sample.branches
    if branches.needs_weak != (weak is not None):
        lacks = f"needs --weak: a lesser run, or an earlier checkpoint's folder in {run / CHECKPOINTS}."
        fix = lacks if weak is None else "has no use for --weak; leave it out."
        raise ConfigError(f"--guidance-kind {branches.kind} {fix}")
    lesser = None if weak is None else open_run(weak, averaged=averaged, device=device)
    if lesser is not None:
        _check_same_task(opened, lesser)
    if branches.needs_routes:
        for path, each in ((run, opened), (weak, lesser)):
            _route(each, path)
    pictures = _pictures(opened, classes, PER_CLASS if per_class is None else per_class, drawn)
    data, vae = opened.config.data, vae or sample.vae
    if data["name"] == "latents" and vae is None:
        print("no --vae given: the pictures show the first latent channels, not images.")
    decode = make_decode(data, opened.shape[0], vae, setting="--vae", batch_size=batch_size, device=device)
    folder = run / "generated" if out is None else out
    _make(folder)
    drawing: dict[str, Any] = {
        "shape": opened.shape,
        "guidance": sample.guidance,
        "null_label": opened.num_classes,
        "weak": None if lesser is None else lesser.model,
        **sample.drawing,
    }
    flops = flops_per_sample(opened.model, opened.objective, **drawing)
    print(f"{flops / 1e9:.4g} GFLOPs a sample: {branches.kind} {sample.guidance:g}, {sample.steps} steps")

    bf16 = opened.config.train.bf16 if precision is None else precision == "bf16"

    def draw(labels: Tensor, **own: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            images = generate(opened.model, opened.objective, labels, **(drawing | own), device=device, progress=False)
        return decode(images)

    return _draw(pictures, folder, batch_size, draw)


def _check_options(
    given: Mapping[str, Any], per_class: int | None, batch_size: int, seed: int | None, seeds: str | None
) -> None:
    """Refuse options that are out of bounds, by their names on the command line."""
    counts = {"--per-class": (per_class, 1), "--batch-size": (batch_size, 1), "--seed": (seed, 0)}
    for option, (value, low) in (counts | {"--steps": (given.get("steps"), 1)}).items():
        if value is not None:
            check_int(value, option, low)
    for option in ("--per-class", "--seed"):
        if seeds is not None and counts[option][0] is not None:
            raise ConfigError(f"--seeds draws one image for each seed, so {option} says nothing; leave it out.")
    for name in ("guidance", "churn", "churn_noise"):
        check_number(f"--{name.replace('_', '-')}", given.get(name, 0), at_least=0)
    for name in ("interval", "churn_interval"):
        check_interval(given.get(name), f"--{name.replace('_', '-')}")


def _replaced(own: SampleConfig, given: Mapping[str, Any], seed: int) -> SampleConfig:
    """A run's own settings with those given in their place; its ratios are for its own kind of guidance."""
    if given.get("guidance_kind", own.guidance_kind) != own.guidance_kind:
        own = replace(own, strong_ratio=0.0, weak_ratio=None, ratio_schedule="constant")
    return replace(own, **given, seed=seed)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {str(folder)!r}: {error.strerror}. Name another folder with --out."
        ) from None


@dataclass(frozen=True)
class _Pictures:
    """The images to draw: the label, the file name and the seed of each, and the grid of the first ones."""

    labels: list[int]
    names: list[str]
    seeds: list[int] | None
    """None: one seed for all."""
    columns: int
    rows: list[str]
    """Names left of the rows of the grid."""


def _pictures(run: Run, classes: str | None, per_class: int, seeds: list[int] | None) -> _Pictures:
    chosen = range(min(10, run.num_classes) if seeds is None else run.num_classes)
    if classes is not None:
        chosen = parse_classes(classes, run.num_classes, run.classes)
    if seeds is not None:
        labels, names = [chosen[seed % len(chosen)] for seed in seeds], [f"{seed:06d}.png" for seed in seeds]
        return _Pictures(labels, names, seeds, min(len(seeds), GRID_COLUMNS), [])
    labels = [label for label in chosen for _ in range(per_class)]
    rows = [run.classes[label] for label in chosen] if run.classes else []
    return _Pictures(labels, image_names(labels), None, per_class, rows)


def _draw(pictures: _Pictures, folder: Path, batch_size: int, draw: Callable[..., Tensor]) -> Path:
    """Write the PNGs, batch by batch, and their grid; `draw(labels, ...)` gives uint8 images (B, H, W, 3 or 1)."""
    grid = folder / "grid.png"
    if older := {path.name for path in folder.glob("*.png")} - {grid.name, *pictures.names}:
        warnings.warn(
            f"{folder} also holds {counted(len(older), 'image')} of other calls, which `tread eval` would count: "
            "delete them, or name another folder with --out.",
            TreadWarning,
            stacklevel=2,
        )
    in_grid: list[Tensor] = []
    for first in tqdm(range(0, len(pictures.labels), batch_size), desc="sampling", unit="batch"):
        here = slice(first, first + batch_size)
        own = {} if pictures.seeds is None else {"seed": torch.tensor(pictures.seeds[here])}
        images = draw(torch.tensor(pictures.labels[here]), batch_size=batch_size, first_index=first, **own).cpu()
        save_images(images, pictures.names[here], folder)
        cells = [divmod(index, pictures.columns) for index in range(first, first + len(images))]  # row, column
        in_grid += [x for x, (i, j) in zip(images, cells, strict=True) if i < GRID_ROWS and j < GRID_COLUMNS]
    columns = min(pictures.columns, GRID_COLUMNS)
    make_grid(torch.stack(in_grid), columns=columns, rows=pictures.rows[:GRID_ROWS]).save(grid)
    return grid


def _check_same_task(run: Run, weak: Run) -> None:
    for what, own, other in (
        ("samples of shape", run.shape, weak.shape),
        ("classes", run.num_classes, weak.num_classes),
        ("objective", run.config.objective, weak.config.objective),
    ):
        if own != other:
            raise ConfigError(f"--weak was trained for another task: {what} {other} there, {own} here.")


def _route(run: Run | None, path: Path | None) -> None:
    """Route the model of a run, if given, as it was trained; `path` is the run's name in messages."""
    if run is None:
        return
    if run.plan is None:
        raise ConfigError(
            f"guidance is to drop tokens, but {path} was trained without routes; choose --guidance-kind cfg or ag "
            "with --strong-ratio 0, or a run of model=tread."
        )
    run.model.route(run.plan)
