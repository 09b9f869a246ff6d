"""`tread export`: write the result of any checkpoint of a fine-tune.

- It needs the run's folder and the base model: no data, no encoders, no GPU.
- The base is not quantized: an adapter has the same names and values on any base.
- Shards, whatever layout wrote them, become one file.
- The weights are the moving average if the run keeps one, as in the results that training writes.
"""

from pathlib import Path
from typing import Any

from tread.errors import CheckpointError, ConfigError
from tread.finetune.config import read_config
from tread.finetune.result.write import RECORD
from tread.finetune.run import write_from
from tread.finetune.settings import FinetuneConfig
from tread.training import checkpoint
from tread.training.job import CONFIG_FILE, LOCK_FILE, locked, saved_settings
from tread.training.loop import CHECKPOINTS


def export(run: Path, *, step: int | None = None, out: Path | None = None) -> list[Path]:
    """Write the result of the checkpoint of `step`, by default the newest; returns the paths.

    It replaces the result in the run's folder, or goes to the folder `out`, which may hold an earlier result.
    """
    config = _config(run)
    path, manifest = _checkpoint(run, step)
    if out is not None and out.resolve() != run.resolve():
        if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (out / RECORD).is_file():
            raise ConfigError(f"--out {out} holds something else than a result; name a new or an empty folder.")
        return write_from(out, config, path, manifest)
    with locked(run / LOCK_FILE) as held:
        if not held:
            raise ConfigError(f"another job is training in {run}: wait for its end, or name another folder with --out.")
        return write_from(run, config, path, manifest)


def _config(run: Path) -> FinetuneConfig:
    if "model_family" not in saved_settings(run):
        raise ConfigError(
            f"{run} is a run of `tread train`, whose checkpoints are its result: draw from it with `tread sample {run}`"
            f", or from one checkpoint with `tread sample {run / CHECKPOINTS}/STEP`."
        )
    return read_config(run / CONFIG_FILE)


def _checkpoint(run: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    folder = run / CHECKPOINTS
    if step is None:
        found = checkpoint.newest(folder)
        if found is None:
            raise CheckpointError(f"{run} has no checkpoint yet; train it first.")
        return found
    path = checkpoint.checkpoint_path(folder, step)
    if not path.is_dir():
        steps = ", ".join(str(int(each.name.removeprefix("step-"))) for each in checkpoint.list_checkpoints(folder))
        raise ConfigError(f"{run} has no checkpoint of step {step}; there are: {steps or 'none'}.")
    return path, checkpoint.read_whole(path)
