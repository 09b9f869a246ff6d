"""What a run leaves behind for others: the adapter or the weights, and a model card.

- Adapters are written by the family's saver, so that stock code loads them. The file's header also says what it was
  trained from, by which plan and for how long; loaders skip what they do not know.
- Files are whole or absent: they are written beside their place and renamed, so that a run killed in a save leaves the
  earlier result. It is written at every checkpoint, in the same place: the folder holds the latest.
- The caller gives models that hold the weights to keep, the average's where there is one.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tread
from tread.data.base import written_whole
from tread.train.finetune.adapters import adapter_metadata, adapter_state
from tread.train.finetune.card import LYCORIS_FILES, Facts, card, kind_of
from tread.train.finetune.family import TuneFamily
from tread.train.finetune.settings import FinetuneConfig


def write_result(
    folder: Path, family: TuneFamily, models: Mapping[str, nn.Module], config: FinetuneConfig, facts: Facts
) -> list[Path]:
    """Write the transformers `models`, by part, or their adapters, and the card into `folder`; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".result-", dir=folder) as name:
        temporary = Path(name)
        if config.adapts:
            _write_adapters(temporary, family, models, config, facts)
        else:
            for part, model in models.items():
                model.save_pretrained(temporary / part)  # pyright: ignore[reportCallIssue]
        paths = [_move(path, folder / path.name) for path in sorted(temporary.iterdir())]
    readme = folder / "README.md"
    with written_whole(readme) as file:
        file.write(card(family, list(models), config, facts).encode())
    return [*paths, readme]


def header(config: FinetuneConfig, facts: Facts) -> dict[str, str]:
    """What the header of an adapter's file says of the run."""
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
    states: dict[str, dict[str, Tensor]] = {
        part: {name: tensor.cpu().contiguous() for name, tensor in adapter_state(model).items()}
        for part, model in models.items()
    }
    if config.lora_type == "lycoris":
        for part, state in states.items():
            save_file(state, folder / LYCORIS_FILES[part], metadata={"format": "pt"})
    else:
        family.save_lora(folder, states, {part: adapter_metadata(model) for part, model in models.items()})
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written: dict[str, str] = file.metadata() or {}
        save_file(load_file(path), path, metadata={**written, **header(config, facts)})


def _move(path: Path, place: Path) -> Path:
    """Give a finished file or folder its place; a folder cannot replace another in one step, so that one goes first."""
    if path.is_dir():
        shutil.rmtree(place, ignore_errors=True)
        path.rename(place)
    else:
        with written_whole(place) as file:
            file.write(path.read_bytes())
    return place
