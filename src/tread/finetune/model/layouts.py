"""The key layouts of ComfyUI and kohya: a LoRA's tensors under the names of the model's first release, and back.

- `comfyui`: `diffusion_model.NAME.lora_A.weight` and `lora_B`, with the scale in `lora_B`, for readers that know no
  alpha. `kohya`: `lora_unet_NAME` with underscores for dots, `.lora_down.weight`, `.lora_up.weight` and `.alpha`.
- Where the original has one linear for several of diffusers', their LoRAs become one of the summed rank: the `lora_A`
  stacked, the `lora_B` as blocks on a diagonal. A part without a LoRA has rows of zeros.
- Both ways are exact up to the rounding of the scale.
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
    """The LoRAs of diffusers' linears, by name, as the tensors of a file; `sizes` has the rows of every linear."""
    check_layout(layout, family)
    found: dict[str, dict[int, Linear]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for name, linear in linears.items():
        original, index, names = _original(family, name)
        found.setdefault(original, {})[index] = linear
        parts[original] = names
    tensors: dict[str, Tensor] = {}
    for original, by_index in found.items():
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

    Of a fused LoRA, the columns that a part does not use are left out where that gives it `rank`.
    """
    by_name = _by_original(tensors, family, sizes)
    found: dict[str, Linear] = {}
    for names, factors in by_name.items():
        down, up = factors["down"].float(), factors["up"].float()
        scale = float(factors["alpha"]) / len(down) if "alpha" in factors else 1.0
        rows = up.split([sizes[name] for name in names]) if len(names) > 1 else [up]
        for name, part in zip(names, rows, strict=True):
            used = part.abs().sum(0) > 0  # (rank,)
            if len(names) > 1 and not used.any():
                continue  # not trained
            if len(names) > 1 and used.sum() == rank:
                found[name] = Linear(down[used], part[:, used], scale)
            else:
                found[name] = Linear(down, part, scale)
    return found


def _by_original(
    tensors: Mapping[str, Tensor], family: str, sizes: Mapping[str, int]
) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """The factors of each original linear, by diffusers' names of its parts."""
    known: dict[str, tuple[str, ...]] = {}
    for name in sizes:
        known[COMFYUI + name] = known[KOHYA + name.replace(".", "_")] = (name,)  # some write diffusers' names so
    for name in sizes:
        try:
            original, _, names = _original(family, name)
        except ConfigError:
            continue
        if all(part in sizes for part in names):
            known[COMFYUI + original] = known[KOHYA + original.replace(".", "_")] = names
    found: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, factor = key.removesuffix(".weight").rpartition(".")
        if factor not in FACTORS or module not in known:
            raise ConfigError(f"init_lora has {key!r}, which is no LoRA of a linear of {family}'s transformer.")
        found.setdefault(known[module], {})[FACTORS[factor]] = tensor
    for names, factors in found.items():
        if not {"down", "up"} <= factors.keys():
            raise ConfigError(f"init_lora has only one factor for {names[0]}; get the file again.")
    return found


def _joined(linears: Mapping[int, Linear], sizes: Sequence[int]) -> Linear:
    """One LoRA for a linear whose rows are those of several."""
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
    """The original name of a linear, its index among the parts of that one, and the names of them all."""
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
