"""Run in each of two processes: trains, and each rank writes down what it holds."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from tread.pretrain.config import compose
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Pretraining
from tread.training.job import end, make_accelerator
from tread.training.loop import fit
from tread.training.parts import trained
from tread.training.session import Session


def digest(weights: dict[str, Tensor]) -> str:
    """A hash of all weights."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights.values())).hexdigest()


def main(arguments: list[str]) -> None:
    config = compose(arguments)
    folder, accelerator = Path(config.output_dir), make_accelerator(config)
    folder.mkdir(exist_ok=True)
    found = facts(config, accelerator, folder)
    (folder / f"rank-{accelerator.process_index}.json").write_text(json.dumps(found))
    end(accelerator)


def facts(config: PretrainConfig, accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """What this rank holds at the start and at the end of a run."""
    apart = Pretraining(config, accelerator, folder)
    with torch.no_grad():
        for parameter in apart.model.parameters():
            parameter += accelerator.process_index  # as if every rank had drawn its own weights
    before = digest(trained(apart.model))
    synchronised = Session(apart, config, accelerator).ema

    task = Pretraining(config, accelerator, folder)
    session = Session(task, config, accelerator)
    fit(session, folder, start=0)
    assert task.handle is not None
    assert synchronised is not None
    assert session.ema is not None
    last = config.train.steps - 1
    task.handle.set_step(last)
    task.loss(task.model, next(task.batches(last)))
    selection = task.handle.selections[0].tolist()
    with session.averaged():
        val_loss = task.validate()["val_loss"]
    return {
        "world": accelerator.num_processes,
        "gradients kept once": session.model.gradient_as_bucket_view,
        "before": before,
        "ema at start": digest(synchronised.averages),
        "model": digest(trained(task.model)),
        "ema": digest(session.ema.averages),
        "selection": selection,
        "val_loss": val_loss,
    }
