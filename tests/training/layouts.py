"""Run in each of two or four processes: tiny runs in every layout, one after the other, in one process group.

`main(["ddp", "fsdp"], folder)` trains `RUNS` by name; each rank writes `NAME/rank-N.json` with the
positions and the selections of every micro-step. Then checkpoints are converted. `train_in` does a run in-process.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import distributed

from tests.pretrain.corner import register
from tests.tiny.runs import TINY
from tread.config.schema import plain
from tread.pretrain.config import compose
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Batch, Pretraining
from tread.training.checkpoint import CHECKPOINTS
from tread.training.job import claimed_folder, make_accelerator, run
from tread.training.session import Session

SETTINGS = [
    *["train.steps=4", "checkpoint.every=2", "validation.every=2", "validation.samples=5", "train.class_dropout=0.3"],
    *["optimizer.warmup_steps=0", "optimizer.clip=0.5"],
]
BF16 = ["train.precision=bf16"]
# two processes draw two batches and one of nine samples
EVALUATE = ["evaluate.every=4", "evaluate.samples=9", "evaluate.batch_size=4", "evaluate.features=corner"]
FSDP, HSDP = "train.parallel=fsdp", "train.parallel=hsdp"
RUNS: dict[str, list[str]] = {
    "ddp": [],
    "fsdp": [FSDP, "sample.every=4", "sample.steps=2", "sample.per_class=1"],
    "hsdp-1": [HSDP, "train.shard_size=1"],
    "hsdp-2": [HSDP, "train.shard_size=2"],
    "micro": [FSDP, "train.micro_steps=2", "train.checkpointing=true"],
    "lion": [FSDP, "optimizer.name=lion", "optimizer.learning_rate=1e-4"],
    "offload": [FSDP, "train.cpu_offload=true"],
    "bf16": [FSDP, *BF16],
    "evaluated": [FSDP, *EVALUATE],
}
"""Layouts by name, with their settings."""
ALONE = {"micro": ["train.micro_steps=2"], "lion": RUNS["lion"][1:], "bf16": BF16, "evaluated": EVALUATE}
"""What one process needs to train as a layout does, where the settings matter."""
CONVERTED = [(source, layout) for source in ("alone", "fsdp") for layout in ("ddp", "fsdp", "hsdp-2", "hsdp-1")]
"""Checkpoints that are loaded in one layout and saved again from it."""


class Recorded(Pretraining):
    """The task, which keeps the positions and the selections of every micro-step."""

    seen: list[dict[str, Any]]

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        loss = super().loss(model, batch)
        assert self.handle is not None
        self.seen.append({"positions": batch.positions.tolist(), "selections": self.handle.selections[0].tolist()})
        return loss


def configured(folder: Path, *settings: str) -> PretrainConfig:
    return compose([*TINY, *SETTINGS, f"output_dir={folder}", *settings])


def train_in(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Train in `folder` and return what the micro-steps saw."""
    AcceleratorState._reset_state(reset_partial_state=False)  # the precision may differ
    config = configured(folder, *settings)
    accelerator = make_accelerator(config)
    with claimed_folder(config, accelerator):
        task = Recorded(config, accelerator, folder)
        task.seen = []
        run(task, config, accelerator, folder, plain(config))
        accelerator.free_memory()
        accelerator.wait_for_everyone()
    return task.seen


def convert(source: Path, target: Path, *settings: str) -> None:
    """Load the newest checkpoint of a run in a layout and save it from there."""
    AcceleratorState._reset_state(reset_partial_state=False)
    config = configured(target, *settings)
    accelerator = make_accelerator(config)
    task = Pretraining(config, accelerator, target)
    session = Session(task, config, accelerator)
    session.save(target / CHECKPOINTS, session.load(source / CHECKPOINTS))
    accelerator.free_memory()
    accelerator.wait_for_everyone()


def main(names: list[str], folder: Path) -> None:
    register()
    for name in names:
        seen = train_in(folder / name, *RUNS[name])
        (folder / name / f"rank-{distributed.get_rank()}.json").write_text(json.dumps(seen))
    for source, layout in CONVERTED:
        if (folder / source).is_dir() and distributed.get_world_size() > 1:
            settings = [setting for setting in RUNS[layout] if "parallel" in setting or "shard" in setting]
            convert(folder / source, folder / f"{source}-to-{layout}", *settings)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # as `benchmarks.layouts` runs it
    torch.set_num_threads(1)
    main(sys.argv[1].split(","), Path(sys.argv[2]))
