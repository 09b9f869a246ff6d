"""`tread export`: write the result of any checkpoint of a fine-tune.

- It needs the run's folder and the base model: no data, no encoders, no GPU.
- The base is not quantized: an adapter has the same names and values on any base.
- The weights are the moving average if the run keeps one, as in the results that training writes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tread.errors import CheckpointError, ConfigError
from tread.finetune.config import read_config
from tread.finetune.experts import joined
from tread.finetune.preflight import open_model, trained_experts
from tread.finetune.result.write import RECORD, write_result
from tread.finetune.run import load_models
from tread.finetune.settings import UNQUANTIZED, FinetuneConfig
from tread.training import checkpoint
from tread.training.job import CONFIG_FILE, LOCK_FILE, locked, saved_settings
from tread.training.loop import CHECKPOINTS


def export(run: Path, *, step: int | None = None, best: bool = False, out: Path | None = None) -> list[Path]:
    """Write the result of the checkpoint of `step`, by default the newest, or of the best one; returns the paths.

    It replaces the result in the run's folder, or goes to the folder `out`, which may hold an earlier result.
    """
    config = _config(run)
    path, manifest = _best(run, step) if best else _checkpoint(run, step)
    if out is not None and out.resolve() != run.resolve():
        if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (out / RECORD).is_file():
            raise ConfigError(f"--out {out} holds something else than a result; name a new or an empty folder.")
        return _write(out, config, path, manifest)
    with locked(run / LOCK_FILE) as held:
        if not held:
            raise ConfigError(f"another job is training in {run}: wait for its end, or name another folder with --out.")
        return _write(run, config, path, manifest)


def _write(folder: Path, config: FinetuneConfig, path: Path, manifest: dict[str, Any]) -> list[Path]:
    family = open_model(config)
    if config.init == "pretrained":
        family.source.check(*(part for part, _, _ in trained_experts(config, family)))
    quantized = config.base_model_precision not in UNQUANTIZED
    plain = replace(config, base_model_precision="no_change") if quantized else config
    models = load_models(replace(plain, gradient_checkpointing=False), family, torch.device("cpu"))
    part = "ema" if config.use_ema and "ema.safetensors" in manifest["files"] else "model"
    checkpoint.load_tensors(checkpoint.trained(joined(models)), checkpoint.load_part(path, part), path)
    return write_result(folder, family, models, config, manifest)


def _config(run: Path) -> FinetuneConfig:
    if "model_family" not in saved_settings(run):
        raise ConfigError(
            f"{run} is a run of `tread train`, whose checkpoints are its result: draw from it with `tread sample {run}`"
            f", or from one checkpoint with `tread sample {run / CHECKPOINTS}/STEP`."
        )
    return read_config(run / CONFIG_FILE)


def _best(run: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    if step is not None:
        raise ConfigError(f"--best and --step {step} name two checkpoints; leave one of them out.")
    found = checkpoint.best(run / CHECKPOINTS)
    if found is None:
        raise ConfigError(f"no checkpoint of {run} was validated, so none is the best: name one with --step.")
    return found[0], checkpoint.read_whole(found[0])


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
