"""`tread export`: write the result of any checkpoint of a fine-tune.

- It needs the run's folder and the base model: no data, no encoders, no GPU.
- The base is loaded unquantized: an adapter has the same names and values on any base.
- Sharded checkpoints become one file, whatever number of processes wrote them.
- The weights are the moving average if the run keeps one, as in the results that training writes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tread.errors import CheckpointError, ConfigError
from tread.finetune.config import read_config
from tread.finetune.model.merge import merge_adapter
from tread.finetune.model.original_names import Layout
from tread.finetune.preflight import source_of
from tread.finetune.result.card import called
from tread.finetune.result.layout import check_kind, write_layout
from tread.finetune.result.write import RECORD, write_result
from tread.finetune.run import load_saved
from tread.finetune.settings import FinetuneConfig, LoraPrecision
from tread.training import checkpoint
from tread.training.checkpoint import CHECKPOINTS
from tread.training.job import CONFIG_FILE, LOCK_FILE, locked, saved_settings


def export(
    run: Path,
    *,
    step: int | None = None,
    best: bool = False,
    out: Path | None = None,
    layout: Layout | None = None,
    merge: bool = False,
    dtype: LoraPrecision | None = None,
) -> list[Path]:
    """Write the result of the checkpoint of `step`, by default the newest, or of the best one; returns the paths.

    It replaces the result in the run's folder, or goes to the folder `out`, which may hold an earlier result. With
    `layout` a LoRA is written beside it, under other names; with `merge` the transformers with the adapter in their
    weights. `dtype` is the precision of the files, by default the run's.
    """
    config, own = _config(run), out is None or out.resolve() == run.resolve()
    _check(config, layout, merge, dtype, own=own)
    path, manifest = _best(run, step) if best else _checkpoint(run, step)
    if dtype is not None:
        config = replace(config, lora_dtype=dtype)
    if layout is not None:
        models, _ = load_saved(config, path, manifest)
        return write_layout(out or run, layout, models, config, manifest)
    if out is not None and not own:
        if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (out / RECORD).is_file():
            raise ConfigError(f"--out {out} holds something else than a result; name a new or an empty folder.")
        return _merged(out, config, path, manifest, dtype) if merge else _write(out, config, path, manifest)
    with locked(run / LOCK_FILE) as held:
        if not held:
            raise ConfigError(f"another job is training in {run}: wait for its end, or name another folder with --out.")
        return _write(run, config, path, manifest)


def _check(config: FinetuneConfig, layout: str | None, merge: bool, dtype: str | None, *, own: bool) -> None:
    """Refuse options that contradict each other or do not apply to this run; `own`: the run's folder is written to."""
    if layout is not None and merge:
        raise ConfigError("--layout and --merge are two results; ask for one after the other.")
    if layout is not None:
        check_kind(layout, config)
    if merge and not config.adapts:
        raise ConfigError("--merge is for adapters, and this run trained all weights: leave it out.")
    if merge and own:
        raise ConfigError("--merge writes whole weights beside no adapter: name a folder for them with --out.")
    if dtype is not None and not config.adapts:
        raise ConfigError("--dtype is for adapters, and this run trained all weights: leave it out.")


def _write(folder: Path, config: FinetuneConfig, path: Path, manifest: dict[str, Any]) -> list[Path]:
    models, family = load_saved(config, path, manifest)
    return write_result(folder, family, models, config, manifest)


def _merged(
    folder: Path, config: FinetuneConfig, path: Path, manifest: dict[str, Any], dtype: str | None
) -> list[Path]:
    """Write the transformers with their adapters merged, as a result with model_type full."""
    if dtype is not None:
        config = replace(
            config,
            base_model_precision="bf16" if dtype == "bf16" else "fp32",
            mixed_precision="bf16" if dtype == "bf16" else "no",
        )
    models, family = load_saved(config, path, manifest)
    for model in models.values():
        merge_adapter(model)
        if dtype == "fp16":
            model.half()
    plain = replace(config, base_model_precision="no_change", offload="none", use_dora=False, init_lora=None)
    full = replace(plain, model_type="full")
    return write_result(folder, family, models, full, {**manifest, "merged": called(config)})


def _config(run: Path) -> FinetuneConfig:
    if "model_family" not in saved_settings(run):
        raise ConfigError(
            f"{run} is a run of `tread train`, whose checkpoints are its result: draw from it with `tread sample {run}`"
            f", or from one checkpoint with `tread sample {run / CHECKPOINTS}/STEP`."
        )
    config = read_config(run / CONFIG_FILE)
    try:
        source_of(config)
    except ConfigError as error:  # a base model that has moved
        raise ConfigError(f"{error} The setting is in {run / CONFIG_FILE}: change it there.") from error
    return config


def _best(run: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    if step is not None:
        raise ConfigError(f"--best and --step {step} name two checkpoints; leave one of them out.")
    best = checkpoint.best(run / CHECKPOINTS)
    if best is None:
        raise ConfigError(f"no checkpoint of {run} was validated, so none is the best: name one with --step.")
    return best[0], checkpoint.read_whole(best[0])


def _checkpoint(run: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    folder = run / CHECKPOINTS
    if step is None:
        newest = checkpoint.newest(folder)
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet; train it first.")
        return newest
    path = checkpoint.checkpoint_path(folder, step)
    if not path.is_dir():
        steps = ", ".join(str(int(each.name.removeprefix("step-"))) for each in checkpoint.list_checkpoints(folder))
        raise ConfigError(f"{run} has no checkpoint of step {step}; there are: {steps or 'none'}.")
    return path, checkpoint.read_whole(path)
