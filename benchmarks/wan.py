"""Wan 2.1 14B shapes, LoRA r16, 81 frames of 480p (32,760 tokens) with 512 text tokens, checkpointed.

    python -m benchmarks.wan

A dense step takes about ten seconds, so two of each kind are timed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.common.lora import Plan, Shape, Variant, run_script

ROWS = {True: "wan-checkpointed"}
VARIANTS = (
    Variant(name="compiled", graphs=False),
    Variant(name="eager", compiled=None, graphs=False),
    Variant(name="flash", sdpa="flash", graphs=False),
)


def shape(
    *,
    layers: int = 40,
    heads: int = 40,
    head_size: int = 128,
    hidden: int = 13824,
    latent: tuple[int, int, int] = (21, 60, 104),
    text: int = 512,
    wide: int = 4096,
) -> Shape:
    """Wan with so many layers on latents (F, H, W)."""

    def model() -> torch.nn.Module:
        from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

        return WanTransformer3DModel(
            num_layers=layers,
            num_attention_heads=heads,
            attention_head_dim=head_size,
            ffn_dim=hidden,
            text_dim=wide,
        )

    def inputs(device: torch.device) -> dict[str, Tensor]:
        return {
            "hidden_states": torch.randn(1, 16, *latent, device=device),
            "timestep": torch.full((1,), 500.0, device=device),
            "encoder_hidden_states": torch.randn(1, text, wide, device=device),
        }

    frames, height, width = latent
    tokens = frames * (height // 2) * (width // 2)
    notes = {"batch": 1, "video_tokens": tokens, "text_tokens": text, "layers": layers}
    return Shape(model=model, inputs=inputs, notes=notes)


SHAPES = {
    "full": shape(),
    "shallow": shape(layers=6),
    "smoke": shape(layers=6, heads=2, head_size=16, hidden=64, latent=(3, 8, 8), text=8, wide=32),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen variants."""
    return run_script(
        "wan",
        __doc__,
        arguments,
        variants=VARIANTS,
        chosen=("compiled",),
        shapes=SHAPES,
        plan=Plan(rows=ROWS, rounds=2, warm_steps=1),
    )


if __name__ == "__main__":
    raise SystemExit(main())
