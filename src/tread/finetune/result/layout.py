"""`write_layout`: the LoRA of a fine-tune as one file per transformer, under the names of ComfyUI or kohya.

The file is named after the run and written beside the result in the diffusers format, which does not change. Its header
has the same metadata as a result's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from tread.errors import ConfigError
from tread.files import atomic_write, writing
from tread.finetune.model.adapters import adapter_scale, adapter_state
from tread.finetune.model.layouts import Linear, check_layout, to_layout
from tread.finetune.model.original_names import Layout
from tread.finetune.result.card import Facts
from tread.finetune.result.write import ADAPTER_DTYPES, header
from tread.finetune.settings import FinetuneConfig

A, B = ".lora_A.weight", ".lora_B.weight"


def check_kind(layout: str, config: FinetuneConfig) -> None:
    """Refuse adapters and families without such a layout, before a model is loaded."""
    if not config.adapts:
        raise ConfigError(f"--layout {layout} is for LoRAs, and this run trained all weights: leave it out.")
    if config.lora_type != "standard" or config.use_dora:
        kind = "a DoRA" if config.use_dora else f"a {config.lora_type} adapter"
        raise ConfigError(
            f"--layout {layout} is for LoRAs, and this run trained {kind}: leave --layout out, or write merged weights "
            "with --merge."
        )
    check_layout(layout, config.model_family)


def write_layout(
    folder: Path,
    layout: Layout,
    models: Mapping[str, nn.Module],
    config: FinetuneConfig,
    manifest: Mapping[str, Any],
) -> list[Path]:
    """Write the LoRA of each transformer in `models`, by part, to `folder`; returns the paths."""
    facts: Facts = {"step": manifest["step"], "tread_config": manifest.get("tread_config")}
    dtype, name = ADAPTER_DTYPES[config.lora_dtype], Path(config.output_dir).resolve().name
    paths = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for part, model in models.items():
            tensors = to_layout(layout, config.model_family, _linears(model), _sizes(model))
            stored = {key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}
            paths.append(folder / f"{name}-{layout}{part.removeprefix('transformer')}.safetensors")
            with atomic_write(paths[-1]) as file:
                file.write(save(stored, metadata={"format": "pt", **header(config, facts)}))
    return paths


def _linears(model: nn.Module) -> dict[str, Linear]:
    """The LoRA of each linear, by diffusers' name."""
    state, scale = adapter_state(model), adapter_scale(model)
    downs = {name.removesuffix(A): tensor for name, tensor in state.items() if name.endswith(A)}
    return {name: Linear(down.cpu(), state[name + B].cpu(), scale) for name, down in downs.items()}


def _sizes(model: nn.Module) -> dict[str, int]:
    """out_features of every linear, by its name in the stock model."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name.removesuffix(".base_layer"): linear.out_features for name, linear in linears}
