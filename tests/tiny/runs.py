"""Tiny runs and what to compare them by: a five-layer model on the digits, some milliseconds a step.

The default is routed, in float32, without trackers, validation and pictures.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from PIL import Image
from torch import Tensor
from webdataset.writer import TarWriter

from tread.pretrain.config import compose
from tread.pretrain.run import pretrain
from tread.pretrain.task import Pretraining
from tread.sampling.generate import generate
from tread.training.checkpoint import CHECKPOINTS, list_checkpoints
from tread.training.metrics import read_metrics
from tread.training.parts import load_part
from tread.training.session import Session

ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 3}
TINY = [
    *["model.depth=5", "model.width=16", "model.heads=2", "train.batch_size=8", "train.precision=float32"],
    *["sample.every=0", "validation.every=0", "validation.samples=16", "log.trackers=none"],
    "model.tread_config=" + json.dumps({"routes": [ROUTE]}),
]

State = dict[str, dict[str, Tensor]]


def forget() -> None:
    """Accelerate remembers its first use in a process; a new run must not see it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(folder: Path, *settings: str) -> Path:
    """A run in `folder`."""
    forget()
    return pretrain(compose([*TINY, f"output_dir={folder}", *settings]))


def go_on(folder: Path, *settings: str) -> Path:
    """Resume the run in `folder`."""
    forget()
    return pretrain(compose([f"resume={folder}", *settings]))


def make_session(folder: Path, *settings: str) -> tuple[Pretraining, Session]:
    """A task and its session, for tests that step by hand."""
    forget()
    config = compose([*TINY, f"output_dir={folder}", *settings])
    task = Pretraining(config, Accelerator(cpu=True), folder)
    return task, Session(task, config, task.accelerator)


def draw(run: Any, labels: Tensor, **options: Any) -> Tensor:
    """What `generate` gives for an opened run or a task on the digits, at seed 0 in three steps."""
    digits = {"shape": (1, 8, 8), "null_label": 10, "seed": 0, "steps": 3, "device": "cpu", "progress": False}
    return generate(run.model, run.objective, labels, **(digits | options))


def write_images(folder: Path, *classes: str, count: int = 3, size: int = 12) -> Path:
    """A folder of random PNGs, one subfolder per class."""
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(folder / name / f"{i}.png")
    return folder


def write_latents(
    path: Path, *, count: int = 24, channels: int = 4, classes: int = 3, last: dict[str, Any] | None = None
) -> Path:
    """A tar of random latents (channels, 4, 4), labels 0, 1, 2, 0, ...; `last` has changes of the last sample."""
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TarWriter(str(path)) as tar:
        for i in range(count):
            latent = rng.normal(size=(channels, 4, 4)).astype(np.float32)
            sample = {"__key__": f"{i:04d}", "latent.npy": latent, "cls": i % classes}
            tar.write(sample | (last if last and i == count - 1 else {}))
    return path


def write_shards(folder: Path, count: int, each: int) -> Path:
    """Tars of random latents (4, 8, 8), labels 0, 1, 2, 0, ... in each."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for n in range(count):
        with TarWriter(str(folder / f"s-{n}.tar")) as tar:
            for i in range(each):
                latent = rng.normal(size=(4, 8, 8)).astype(np.float16)
                tar.write({"__key__": f"{n}-{i}", "latent.npy": latent, "cls": i % 3})
    return folder


def final_state(folder: Path) -> State:
    """Every tensor of a run's newest checkpoint, by part and name."""
    newest = list_checkpoints(folder / CHECKPOINTS)[-1]
    return {part: load_part(newest, part) for part in ("model", "ema", "optimizer")}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without those that depend on the clock."""
    return [line for line in read_metrics(folder) if "images_per_second" not in line]


def losses(folder: Path) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def assert_same_state(one: State, other: State) -> None:
    """Bit for bit: every weight, average and moment."""
    assert one.keys() == other.keys()
    for part, tensors in one.items():
        assert tensors.keys() == other[part].keys()
        different = [name for name, tensor in tensors.items() if not torch.equal(tensor, other[part][name])]
        assert not different, part


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit: every figure of every step and every tensor at the end."""
    assert metrics(one) == metrics(other)
    assert_same_state(final_state(one), final_state(other))
