"""Train the base and the arms, each by one call of the product's `finetune`.

- Everything resumes: what is done is skipped, what was cut short goes on at its step, so the command is repeated until
  all is done. Near the end of its time it asks the running arm to stop, as Ctrl-C would.
- One process for all: imports are costly, and the graphs of one arm serve the next.
- Arms are not compiled unless asked: with a graph for every ratio and kind of layer, some fifty in all, compiling
  would take much of the time that there is.
- What `report` reads goes to OUT/results, and is small: metrics, pictures, a note on each run and on the machine.
"""

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import machine, write_json
from benchmarks.tuning.model import start_as_identity
from tread.finetune.run import finetune
from tread.finetune.settings import FinetuneConfig
from tread.training.metrics import FILE, read_metrics

from .arms import ARMS, PICTURED, Arm, Scale, arm_config, base_config
from .measure import NOTE
from .pictures import Drawing
from .prepare import some_captions

DEFAULTS = {field.name: field.default for field in fields(FinetuneConfig)}


class OutOfTime(Exception):
    """The time is over between two runs, or before one has begun to train."""


def run(
    out: Path, scale: Scale, *, budget: float, base_seconds: float, arms: Sequence[Arm] = ARMS, compiled: bool = False
) -> bool:
    """Train what is not done yet for at most `budget` seconds, the base for `base_seconds`; True when all is done."""
    ends = time.monotonic() + budget
    torch._dynamo.config.recompile_limit = 256  # all arms together
    results = out / "results"
    results.mkdir(exist_ok=True)
    command = " ".join(["python -m benchmarks.finetune_spike", *sys.argv[1:]])
    write_json(results / "machine.json", machine() | {"command": command})
    drawing = Drawing(
        base=out / "trained",
        prompts=[
            (caption, name)
            for name, count in scale.pictures.items()
            for caption in some_captions(out / "data" / name, count)
        ],
        size=scale.resolution,
        steps=scale.solver_steps,
    )
    write_json(results / "prompts.json", drawing.prompts)
    try:
        if not is_done(results / "base"):
            write_transformer(out / "base" / "transformer", scale)
            config = base_config(out, scale)
            left = ends - time.monotonic()
            trained = train(config, results / "base", min(base_seconds, left))
            if not trained.whole and left < base_seconds:
                return False
            use_trained(out)
            finish(config, results / "base", {"kind": "full", "peak_bytes": trained.peak_bytes}, drawing)
        for arm in arms:
            if not is_done(results / arm.name):
                config = arm_config(out, scale, arm, compiled=compiled)
                trained = train(config, results / arm.name, ends - time.monotonic())
                if not trained.whole:
                    return False
                finish(config, results / arm.name, asdict(arm) | {"peak_bytes": trained.peak_bytes}, drawing)
    except OutOfTime:
        return False
    return True


def is_done(results: Path) -> bool:
    """Whether a run has left its note."""
    return (results / NOTE).is_file()


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    whole: bool
    """It has come to its last step."""
    peak_bytes: int | None
    """The most memory it had on the GPU at once."""


def train(config: FinetuneConfig, results: Path, seconds: float) -> Trained:
    """Go on with a run for at most so many seconds."""
    print(f"== {results.name}", flush=True)
    gc.collect()
    before = 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with limited(seconds):
        folder = finetune(config)
    results.mkdir(exist_ok=True)
    shutil.copy(folder / FILE, results / FILE)
    peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else None
    return Trained(read_metrics(folder)[-1]["step"] == config.max_train_steps, peak)


def finish(config: FinetuneConfig, results: Path, facts: dict[str, Any], drawing: Drawing) -> None:
    """Draw the pictures of a run and note that it is done."""
    if results.name in PICTURED:
        drawing.draw(Path(config.output_dir), results, lora=config.adapts)
    settings = ("train_batch_size", "learning_rate", "tread_config", "compile", "resolution", "lora_rank")
    facts |= {"steps": read_metrics(results)[-1]["step"]}
    write_json(results / NOTE, facts | {name: getattr(config, name) for name in settings})


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """After so many seconds the training loop is asked to stop; where none runs, OutOfTime is raised."""

    def ring(*_: object) -> None:
        raise OutOfTime

    if seconds <= 0:
        raise OutOfTime
    before = signal.signal(signal.SIGTERM, ring)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def write_transformer(folder: Path, scale: Scale) -> None:
    """Fresh weights; every layer starts as the identity."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    if (folder / "diffusion_pytorch_model.safetensors").is_file():
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FluxTransformer2DModel(**scale.transformer)
    start_as_identity(model)
    print(f"base: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters")
    model.save_pretrained(folder)


def write_prediction_config(out: Path, scale: Scale) -> Path:
    """OUT/config.json: a LoRA on fresh weights, whose steps take as long as on trained ones."""
    write_transformer(out / "base" / "transformer", scale)
    arm = arm_config(out, scale, ARMS[0], compiled=torch.cuda.is_available())
    config = replace(arm, pretrained_model_name_or_path=str(out / "base"), graphs=torch.cuda.is_available())
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    write_json(out / "config.json", {name: given[name] for name in given if given[name] != DEFAULTS.get(name)})
    return out / "config.json"


def use_trained(out: Path) -> None:
    """OUT/trained: the pipeline with the trained transformer."""
    whole, unfinished = out / "trained", out / "trained.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(whole, ignore_errors=True)
    shutil.copytree(out / "base", unfinished, ignore=shutil.ignore_patterns("transformer"))
    shutil.copytree(out / "runs" / "base" / "transformer", unfinished / "transformer")
    unfinished.rename(whole)
