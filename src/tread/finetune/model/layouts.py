"""The key layouts of ComfyUI and kohya: a LoRA's tensors under the names of the model's first release, and back.

- `comfyui`: `diffusion_model.NAME.lora_A.weight` and `lora_B`, with the scale multiplied into `lora_B`, for readers
  without alpha. `kohya`: `lora_unet_NAME` with underscores for dots, `.lora_down.weight`, `.lora_up.weight`, `.alpha`.
- If the original fuses several of diffusers' linears into one (QKV), their LoRAs become one of the summed rank:
  `lora_A` is stacked, `lora_B` is block-diagonal. A part without a LoRA has rows of zeros.
- Both conversions are exact up to the rounding of the scale.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tread.errors import ConfigError, check_choice
from tread.finetune.model.original_names import LAYOUTS, NAMES, Layout

COMFYUI, KOHYA = "diffusion_model.", "lora_unet_"
FACTORS = {
    "lora_A": "down",
    "lora_down": "down",
    "lora_B": "up",
    "lora_up": "up",
    "alpha": "alpha",
}


@dataclass(frozen=True)
class Linear:
    """The LoRA of one linear: its update is scale * up @ down."""

    down: Tensor
    """(rank, in)"""
    up: Tensor
    """(out, rank)"""
    scale: float = 1.0


def to_layout(
    layout: Layout, family: str, linears: Mapping[str, Linear], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Convert the LoRAs of diffusers' linears to the tensors of a file; `sizes` has the rows of every linear."""
    check_layout(layout, family)
    fused: dict[str, dict[int, Linear]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for name, linear in linears.items():
        original, index, names = _original(family, name)
        fused.setdefault(original, {})[index] = linear
        parts[original] = names
    tensors: dict[str, Tensor] = {}
    for original, by_index in fused.items():
        joined = by_index[0] if len(parts[original]) == 1 else _joined(by_index, [sizes[n] for n in parts[original]])
        if layout == "comfyui":
            tensors[f"{COMFYUI}{original}.lora_A.weight"] = joined.down
            tensors[f"{COMFYUI}{original}.lora_B.weight"] = joined.up * joined.scale
        else:
            key = KOHYA + original.replace(".", "_")
            tensors[f"{key}.lora_down.weight"] = joined.down
            tensors[f"{key}.lora_up.weight"] = joined.up
            tensors[f"{key}.alpha"] = torch.tensor(joined.scale * len(joined.down))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def check_layout(layout: str, family: str) -> None:
    """Refuse a layout that does not exist, or not for this family."""
    check_choice(layout, "--layout", LAYOUTS)
    if family not in LAYOUTS[layout]:  # pyright: ignore[reportArgumentType]
        raise ConfigError(
            f"--layout {layout} is not defined for {family}; it is for: {', '.join(LAYOUTS[layout])}. "  # pyright: ignore[reportArgumentType]
            "Leave --layout out for the diffusers format, or write merged weights with --merge."
        )


def has_layout(names: Sequence[str]) -> bool:
    """Whether a file's names are those of ComfyUI's or kohya's layout."""
    return any(name.startswith((COMFYUI, KOHYA)) for name in names)


def from_layout(tensors: Mapping[str, Tensor], family: str, sizes: Mapping[str, int], rank: int) -> dict[str, Linear]:
    """The LoRAs of diffusers' linears from a file of either layout, with original names or with diffusers'.

    A part of a fused LoRA keeps only the columns that it uses, if these are `rank` many.
    """
    by_name = _by_original(tensors, family, sizes)
    loras: dict[str, Linear] = {}
    for names, factors in by_name.items():
        down, up = factors["down"].float(), factors["up"].float()
        scale = float(factors["alpha"]) / len(down) if "alpha" in factors else 1.0
        rows = up.split([sizes[name] for name in names]) if len(names) > 1 else [up]
        for name, part in zip(names, rows, strict=True):
            used = part.abs().sum(0) > 0  # (rank,)
            if len(names) > 1 and not used.any():
                continue  # not trained
            if len(names) > 1 and used.sum() == rank:
                loras[name] = Linear(down[used], part[:, used], scale)
            else:
                loras[name] = Linear(down, part, scale)
    return loras


def _by_original(
    tensors: Mapping[str, Tensor], family: str, sizes: Mapping[str, int]
) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """The down, up and alpha tensors of each original linear, keyed by diffusers' names of its parts."""
    known: dict[str, tuple[str, ...]] = {}
    for name in sizes:  # some trainers write diffusers' names with these prefixes
        known[COMFYUI + name] = known[KOHYA + name.replace(".", "_")] = (name,)
    for name in sizes:
        try:
            original, _, names = _original(family, name)
        except ConfigError:
            continue
        if all(part in sizes for part in names):
            known[COMFYUI + original] = known[KOHYA + original.replace(".", "_")] = names
    grouped: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, factor = key.removesuffix(".weight").rpartition(".")
        if factor not in FACTORS or module not in known:
            raise ConfigError(f"init_lora has {key!r}, which is no LoRA of a linear of {family}'s transformer.")
        grouped.setdefault(known[module], {})[FACTORS[factor]] = tensor
    for names, factors in grouped.items():
        if not {"down", "up"} <= factors.keys():
            raise ConfigError(f"init_lora has only one factor for {names[0]}; get the file again.")
    return grouped


def _joined(linears: Mapping[int, Linear], sizes: Sequence[int]) -> Linear:
    """The block-diagonal LoRA of a fused linear; `linears` are those of its parts, by index."""
    (scale,) = {linear.scale for linear in linears.values()}
    down = torch.cat([linears[index].down for index in sorted(linears)])
    up = down.new_zeros(sum(sizes), len(down))
    column = 0
    for index in sorted(linears):
        row, block = sum(sizes[:index]), linears[index].up
        up[row : row + sizes[index], column : column + block.shape[1]] = block
        column += block.shape[1]
    return Linear(down, up, scale)


def _original(family: str, name: str) -> tuple[str, int, tuple[str, ...]]:
    """The original name of a linear, its index among the parts fused there, and the names of all these parts."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
    number = numbers[0] if numbers else ""
    template = re.sub(r"(?<=\.)\d+(?=\.)", "{}", name, count=1) if numbers else name
    for original, names in NAMES[family].items():
        if template in names:
            return original.format(number), names.index(template), tuple(part.format(number) for part in names)
    raise ConfigError(
        f"{name} has no counterpart in the first release of {family}'s model, whose names ComfyUI and kohya use: name "
        "other lora_targets, or write merged weights with --merge."
    )
