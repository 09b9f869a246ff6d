"""`tread train`: from a config to a trained run."""

from dataclasses import replace
from pathlib import Path

from tread.config.schema import plain
from tread.page.write import write_at_end
from tread.pretrain.config import from_run
from tread.pretrain.resumed import check_resumed
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Pretraining
from tread.training.job import claimed_folder, end, make_accelerator, run


def pretrain(config: PretrainConfig) -> Path:
    """Train a config, or resume its run; returns the run's folder, raises `Stopped` if a signal ended it."""
    check_resumed(config)
    accelerator = make_accelerator(config)
    with claimed_folder(config, accelerator) as folder:
        task = Pretraining(config, accelerator, folder)
        config = task.config  # with the steps of its epochs
        kept = replace(config, checkpoint=replace(config.checkpoint, data_changed="refuse"))  # accepted once
        stopped = run(task, config, accelerator, folder, plain(kept), saved=lambda run: plain(from_run(run)))
        write_at_end(folder, accelerator)
        accelerator.print(f"run: {folder}")
        end(accelerator, stopped)
    return folder
