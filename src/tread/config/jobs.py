"""Which job a config is for, told by its names: the one rule of every command that reads a config."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tread.config.documents import ENV_SUFFIX

FINETUNE_KEYS = ("model_family", "pretrained_model_name_or_path")
"""Names that every config of `tread finetune` has, and those of other trainers too."""
TRAIN_SECTIONS = (
    *("defaults", "model", "train", "objective", "ema", "checkpoint", "validation", "sample", "evaluate", "log"),
    "resume",
)
"""Top-level names that only a config of `tread train` has."""
SHARED = ("data", "optimizer", "output_dir")
"""Top-level names that configs of both jobs have."""


def job_of(names: Iterable[object], path: str | Path) -> Literal["finetune", "train"] | None:
    """The job of a config with these top-level names, read from a file at `path`; None if it is of neither.

    Names that both jobs have are, alone, a config of `tread train`, which needs no others.

    >>> job_of(["--model_family", "data"], "c.json"), job_of(["data"], "c.yaml"), job_of(["routes"], "c.yaml")
    ('finetune', 'train', None)
    """
    given = {str(name).lstrip("-") for name in names}
    if given & {*FINETUNE_KEYS} or Path(path).name.lower().endswith(ENV_SUFFIX):
        return "finetune"
    return "train" if given & {*TRAIN_SECTIONS} or given <= {*SHARED} else None
