"""Stable Diffusion 3.5 large shapes, LoRA r16, 1024 pixels (4096 tokens) with 333 text tokens, route 0.5 over 2..-2.

python -m benchmarks.sd3
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.common.lora import Plan, Shape, Variant, run_script

ROWS = {False: "sd3"}
VARIANTS = (
    Variant(name="graphs"),
    Variant(name="compiled", graphs=False),
    Variant(name="eager", compiled=None, graphs=False),
    Variant(name="flash", sdpa="flash"),
)


def shape(
    *, layers: int = 38, heads: int = 38, head_size: int = 64, latent: int = 128, text: int = 333, wide: int = 4096
) -> Shape:
    """SD3.5 with so many layers on latents of `latent` x `latent`."""
    pooled = wide // 2

    def model() -> torch.nn.Module:
        from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

        return SD3Transformer2DModel(
            sample_size=latent,
            num_layers=layers,
            num_attention_heads=heads,
            attention_head_dim=head_size,
            caption_projection_dim=heads * head_size,
            joint_attention_dim=wide,
            pooled_projection_dim=pooled,
            pos_embed_max_size=latent * 3 // 2,
            qk_norm="rms_norm",
        )

    def inputs(device: torch.device) -> dict[str, Tensor]:
        return {
            "hidden_states": torch.randn(1, 16, latent, latent, device=device),
            "encoder_hidden_states": torch.randn(1, text, wide, device=device),
            "pooled_projections": torch.randn(1, pooled, device=device),
            "timestep": torch.full((1,), 500.0, device=device),
        }

    notes = {"batch": 1, "image_tokens": (latent // 2) ** 2, "text_tokens": text, "layers": layers}
    return Shape(model=model, inputs=inputs, notes=notes)


SHAPES = {
    "full": shape(),
    "shallow": shape(layers=6),
    "smoke": shape(layers=6, heads=2, head_size=16, latent=16, text=8, wide=32),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen variants."""
    chosen, plan = ("graphs", "compiled"), Plan(rows=ROWS, profiled="compiled")
    return run_script("sd3", __doc__, arguments, variants=VARIANTS, chosen=chosen, shapes=SHAPES, plan=plan)


if __name__ == "__main__":
    raise SystemExit(main())
