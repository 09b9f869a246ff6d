"""`tread train`: from a config to a trained run."""

from pathlib import Path

from tread.config.schema import plain
from tread.pretrain.settings import PretrainConfig
from tread.pretrain.task import Pretraining
from tread.training.job import claimed_folder, end, make_accelerator, run


def pretrain(config: PretrainConfig) -> Path:
    """Run (or go on with) the training of a config; returns the run's folder."""
    accelerator = make_accelerator(config)
    with claimed_folder(config, accelerator) as folder:
        run(Pretraining(config, accelerator, folder), config, accelerator, folder, plain(config))
    end(accelerator)
    accelerator.print(f"run: {folder}")
    return folder
