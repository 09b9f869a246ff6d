"""FLUX.2-dev shapes: one image of 4096 tokens with 512 text tokens; measured by benchmarks.loop."""

import torch
from torch import Tensor

from benchmarks.common.lora import Shape


def shape(
    *, double: int = 8, single: int = 48, side: int = 64, text: int = 512, channels: int = 128, **config: object
) -> Shape:
    """FLUX.2 with so many layers on `side` x `side` tokens; `config` is what else differs from FLUX.2-dev's."""

    def model() -> torch.nn.Module:
        from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel

        settings = {"num_layers": double, "num_single_layers": single, "in_channels": channels, **config}
        return Flux2Transformer2DModel(**settings)  # pyright: ignore[reportArgumentType]

    def inputs(device: torch.device) -> dict[str, Tensor]:
        places, none = torch.arange(side, device=device), torch.zeros(1, device=device, dtype=torch.int64)
        words = torch.arange(text, device=device)
        wide: int = config.get("joint_attention_dim", 15360)  # pyright: ignore[reportAssignmentType]
        return {
            "hidden_states": torch.randn(1, side * side, channels, device=device),
            "encoder_hidden_states": torch.randn(1, text, wide, device=device),
            "timestep": torch.full((1,), 0.5, device=device),
            "guidance": torch.ones(1, device=device),
            "img_ids": torch.cartesian_prod(none, places, places, none).unsqueeze(0),  # (1, S, 4)
            "txt_ids": torch.cartesian_prod(none, none, none, words).unsqueeze(0),
        }

    notes = {"batch": 1, "image_tokens": side * side, "text_tokens": text, "double": double, "single": single}
    return Shape(model=model, inputs=inputs, notes=notes)


TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 4, 4, 4),
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 16,
}
SHAPES = {
    "full": shape(),
    "shallow": shape(double=3, single=4),
    "smoke": shape(double=3, single=4, side=8, text=8, channels=16, **TINY),
}
