"""LoRA files: their names, and `save_lora`, which writes them for the loader of a stock pipeline, or for peft's.

- A stock file holds one transformer. The second expert's is a file of its own, loaded by
  `pipeline.load_lora_weights(folder, weight_name=LORA_FILES["transformer_2"], load_into_transformer_2=True)`.
- Pipelines without a loader for their transformer get a folder that `PeftModel.from_pretrained` reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

LORA_FILES = {"transformer": "pytorch_lora_weights.safetensors", "transformer_2": "pytorch_lora_weights_2.safetensors"}
"""The file of each transformer in a result."""
PEFT_FILE, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."


def has_lora_loader(pipeline_name: str) -> bool:
    """Whether a stock pipeline's `load_lora_weights` loads into its transformer; PRX's supports only UNets."""
    import diffusers

    return "transformer" in getattr(getattr(diffusers, pipeline_name), "_lora_loadable_modules", ())


def save_lora(
    pipeline_name: str,
    folder: Path,
    layers: Mapping[str, dict[str, Tensor]],
    metadata: Mapping[str, dict[str, Any]],
) -> None:
    """Write the LoRA of each transformer for the stock pipeline's loader, or for peft's where it has none."""
    import diffusers

    if not has_lora_loader(pipeline_name):
        return _save_peft(folder, layers["transformer"], metadata["transformer"])
    cls: Any = getattr(diffusers, pipeline_name)
    for part, tensors in layers.items():
        cls.save_lora_weights(
            folder,
            transformer_lora_layers=tensors,
            transformer_lora_adapter_metadata=metadata[part],
            weight_name=LORA_FILES[part],
        )


def _save_peft(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A folder for `PeftModel.from_pretrained(pipeline.transformer, folder)`."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / PEFT_FILE, metadata={"format": "pt"})
    (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2))
