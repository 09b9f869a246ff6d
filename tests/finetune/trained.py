"""Families and their whole pipelines, calls of a model, texts of a batch, and saved LoRAs that change the output."""

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tread
from tread.finetune.families import open_family
from tread.finetune.family import Batch, TuneFamily
from tread.finetune.model import lora_files
from tread.finetune.model.adapters import adapter_metadata, adapter_state, add_adapter
from tread.finetune.model.source import Source

PROMPTS = ["a photo of a small orange cat, sitting on a red sofa", "two dogs"]


def opened(folder: Path, name: str) -> tuple[Any, Any]:
    """The family of a folder and its whole pipeline."""
    source = Source(str(folder))
    return open_family(name, source), source.pipeline(*source.parts)


def changed(folder: str | Path, to: Path, file: str, **values: Any) -> Path:
    """A copy of a pipeline in which a JSON file has other values."""
    shutil.copytree(folder, to)
    (to / file).write_text(json.dumps(json.loads((to / file).read_text()) | values))
    return to


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_of(family: TuneFamily, pipeline: Any, prompts: list[str]) -> Batch:
    """The text of a batch."""
    collated = family.collate_text(family.encode_text(pipeline, prompts))
    return {f"text.{name}": value for name, value in collated.items()}


def train_routed(model: nn.Module, handle: tread.Attachment, loss: Callable[[], Tensor], *, steps: int) -> float:
    """The dense loss before a few routed steps."""
    with handle.dense():
        before = loss().item()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        handle.set_step(step)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return before


@contextmanager
def recorded(*models: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """The arguments of every call of the models, by name; those that say nothing are left out."""
    calls: list[dict[str, Any]] = []

    def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        silent = ("return_dict", "joint_attention_kwargs", "attention_kwargs")
        given = {name: v for name, v in named.items() if name not in silent and v is not None}
        # a copy: some pipelines write into their latents
        calls.append({name: v.clone() if isinstance(v, Tensor) else v for name, v in given.items()})

    hooks = [model.register_forward_pre_hook(record, with_kwargs=True) for model in models]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def save_lora(family: TuneFamily, folder: Path) -> dict[str, nn.Module]:
    """Adapted transformers, whose LoRAs lie in the folder."""
    models: dict[str, nn.Module] = {}
    for seed, (part, _, _) in enumerate(family.experts):
        models[part] = model = family.source.transformer(part, dtype=torch.float32).eval()
        add_adapter(model, kind="standard", rank=2, alpha=4, targets=family.lora_targets, seed=seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.1 * drawn(*parameter.shape, seed=seed)
    layers = {part: adapter_state(model) for part, model in models.items()}
    metadata = {part: adapter_metadata(model) for part, model in models.items()}
    lora_files.save_lora(family.source.pipeline_name, folder, layers, metadata)
    return models
