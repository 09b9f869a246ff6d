"""Qwen-Image shapes: one image of 4096 tokens with 256 text tokens; measured by benchmarks.loop."""

from typing import Any

import torch

from benchmarks.common.lora import Shape


def shape(*, layers: int = 60, side: int = 64, text: int = 256, channels: int = 64, **config: object) -> Shape:
    """Qwen-Image with so many layers on `side` x `side` tokens; `config` is what else differs from the released one."""

    def model() -> torch.nn.Module:
        from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

        settings = {"num_layers": layers, "in_channels": channels, **config}
        return QwenImageTransformer2DModel(**settings)  # pyright: ignore[reportArgumentType]

    def inputs(device: torch.device, rows: int = side, columns: int = side, text: int = text) -> dict[str, Any]:
        wide: int = config.get("joint_attention_dim", 3584)  # pyright: ignore[reportAssignmentType]
        return {
            "hidden_states": torch.randn(1, rows * columns, channels, device=device),
            "encoder_hidden_states": torch.randn(1, text, wide, device=device),
            "timestep": torch.full((1,), 0.5, device=device),
            "img_shapes": [[(1, rows, columns)]],
        }

    notes = {"batch": 1, "image_tokens": side * side, "text_tokens": text, "layers": layers}
    return Shape(model=model, inputs=inputs, notes=notes)


TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 6, 6),
    "joint_attention_dim": 32,
    "out_channels": 4,
}
SHAPES = {"full": shape(), "shallow": shape(layers=6), "smoke": shape(layers=6, side=8, text=8, channels=16, **TINY)}
