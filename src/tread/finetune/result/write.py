"""`write_result`: write the result of a fine-tune (the adapter, or all weights) and its model card.

- A result is a function of a checkpoint, its manifest included, and the run's config. `result.json` is written last and
  names the checkpoint; on resume a result of another checkpoint, or an incomplete one, is written again.
- Adapters are written by the family's saver, so that stock code loads them. The header of the file also has the base
  model, the plan and the number of steps; loaders ignore unknown keys.
- A result is written to a temporary folder, synced and renamed. A folder cannot replace another atomically: the old
  one is renamed first and removed once the new one is in place. Leftovers of a killed process are removed by the next.
- The models passed hold the weights to write: the moving average if there is one.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tread
from tread.files import fsync, is_safetensors, write_text, writing
from tread.finetune.family import TuneFamily
from tread.finetune.model.adapters import adapter_metadata, adapter_state
from tread.finetune.model.lora_files import save_lora
from tread.finetune.result.card import LYCORIS_FILES, Facts, card, kind_of
from tread.finetune.settings import FinetuneConfig

RECORD = "result.json"
"""The file that records the checkpoint of a result and the sizes of its files."""
CARD = "README.md"
"""The model card."""
ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`lora_dtype` -> the dtype of a file."""


def write_result(
    folder: Path,
    family: TuneFamily,
    models: Mapping[str, nn.Module],
    config: FinetuneConfig,
    manifest: Mapping[str, Any],
) -> list[Path]:
    """Write the transformers in `models`, by part, or their adapters, and the card to `folder`; returns the paths.

    `manifest` belongs to the checkpoint whose weights the models hold.
    """
    facts = cast("Facts", {name: manifest[name] for name in Facts.__annotations__ if name in manifest})
    facts["previews"] = [(text, path) for text, path in facts.get("previews", ()) if (folder / path).is_file()]
    with writing(folder):
        return _write(folder, family, models, config, facts)


def _write(
    folder: Path, family: TuneFamily, models: Mapping[str, nn.Module], config: FinetuneConfig, facts: Facts
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    with tempfile.TemporaryDirectory(prefix=".result-", dir=folder, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        if config.adapts:
            _write_adapters(temporary, family, models, config, facts)
        else:
            for part, model in models.items():
                model.save_pretrained(temporary / part)  # pyright: ignore[reportCallIssue]
        written = sorted(path for path in temporary.rglob("*") if path.is_file())
        sizes = {path.relative_to(temporary).as_posix(): path.stat().st_size for path in written}
        for path in written:
            fsync(path)
        (folder / RECORD).unlink(missing_ok=True)  # while files of two checkpoints are mixed, there is no record
        paths = [_replace(path, folder / path.name) for path in sorted(temporary.iterdir())]
    write_text(folder / CARD, card(family, list(models), config, facts))
    known = {"step": facts.get("step"), "checkpoint": facts.get("id"), "files": sizes}
    write_text(folder / RECORD, json.dumps(known, indent=2) + "\n")
    return [*paths, folder / CARD, folder / RECORD]


def has_result(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a folder has the complete result of the checkpoint with this manifest; the card may have been edited."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        same = (record["step"], record["checkpoint"]) == (manifest["step"], manifest.get("id"))
        whole = all((folder / name).stat().st_size == size for name, size in record["files"].items())
        opened = all(is_safetensors(folder / name) for name in record["files"] if name.endswith(".safetensors"))
        return same and whole and opened and (folder / CARD).is_file()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def header(config: FinetuneConfig, facts: Facts) -> dict[str, str]:
    """Metadata about the run for the header of an adapter's file."""
    return {
        "base_model": config.pretrained_model_name_or_path,
        "model_family": config.model_family,
        "adapter": kind_of(config),
        "rank": str(config.lora_rank),
        "steps": str(facts.get("step", 0)),
        "tread_config": json.dumps(facts.get("tread_config")),
        "tread_version": tread.__version__,
    }


def _write_adapters(
    folder: Path, family: TuneFamily, models: Mapping[str, nn.Module], config: FinetuneConfig, facts: Facts
) -> None:
    dtype = ADAPTER_DTYPES[config.lora_dtype]
    states: dict[str, dict[str, Tensor]] = {
        part: {name: tensor.cpu().to(dtype).contiguous() for name, tensor in adapter_state(model).items()}
        for part, model in models.items()
    }
    if config.lora_type == "lycoris":
        for part, state in states.items():
            save_file(state, folder / LYCORIS_FILES[part], metadata={"format": "pt"})
    else:
        metadata = {part: adapter_metadata(model) for part, model in models.items()}
        save_lora(family.source.pipeline_name, folder, states, metadata)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written: dict[str, str] = file.metadata() or {}
        save_file(load_file(path), path, metadata={**written, **header(config, facts)})


def _replace(path: Path, target: Path) -> Path:
    old = target.with_name(f".{target.name}.old")
    if path.is_dir() and target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    os.replace(path, target)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
    return target


def _sweep(folder: Path) -> None:
    """Remove temporary files of killed processes, but not old folders, which `_replace` removes."""
    for path in folder.glob(".result-*"):
        shutil.rmtree(path, ignore_errors=True)
    for name in (CARD, RECORD):
        for path in folder.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)
