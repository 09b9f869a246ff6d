"""FLUX.1-dev shapes, LoRA r16, one image of 4096 tokens with 512 text tokens, route 0.5 over 2..-2.

    python -m benchmarks.flux                                    # as the product; checkpointed and not
    python -m benchmarks.flux --variants flash                   # other ways, one or several in a process

`default-sdpa` belongs in a process of its own: torch 2.11's own way to cuDNN ends FLUX in an illegal memory access.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.common.lora import Plan, Shape, Variant, run_script

ROWS = {True: "flux-checkpointed", False: "flux"}
VARIANTS = (
    Variant(name="graphs"),
    Variant(name="compiled", graphs=False),
    Variant(name="selective", selective=True),
    Variant(name="checkpointed-around", around=True, graphs=False),
    Variant(name="eager", compiled=None, graphs=False),
    Variant(name="flash", sdpa="flash"),
    Variant(name="bf16-lora", lora="bf16"),
    Variant(name="bf16-lora-copied", lora="bf16 + float32 copy"),
    Variant(name="max-autotune", compiled="max-autotune-no-cudagraphs"),
    Variant(name="torch-graphs", compiled="reduce-overhead", graphs=False),
    Variant(name="default-sdpa", sdpa="default"),
)
CHOSEN = ("graphs", "selective", "compiled")
TINY = {
    "in_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 6, 6),
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
}


def shape(
    *, double: int = 19, single: int = 38, side: int = 64, text: int = 512, channels: int = 64, **config: object
) -> Shape:
    """FLUX with so many layers on `side` x `side` tokens; `config` is what else differs from FLUX.1-dev's."""
    wide, pooled = config.get("joint_attention_dim", 4096), config.get("pooled_projection_dim", 768)

    def model() -> torch.nn.Module:
        from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

        settings = {"num_layers": double, "num_single_layers": single, "guidance_embeds": True, **config}
        return FluxTransformer2DModel(**settings)  # pyright: ignore[reportArgumentType]

    def inputs(device: torch.device, rows: int = side, columns: int = side, text: int = text) -> dict[str, Tensor]:
        places = torch.arange(max(rows, columns), device=device)
        return {
            "hidden_states": torch.randn(1, rows * columns, channels, device=device),
            "encoder_hidden_states": torch.randn(1, text, wide, device=device),  # pyright: ignore[reportArgumentType]
            "pooled_projections": torch.randn(1, pooled, device=device),  # pyright: ignore[reportArgumentType]
            "timestep": torch.full((1,), 0.5, device=device),
            "guidance": torch.ones(1, device=device),
            "img_ids": torch.cartesian_prod(torch.zeros_like(places[:1]), places[:rows], places[:columns]),  # (S, 3)
            "txt_ids": torch.zeros(text, 3, device=device, dtype=places.dtype),
        }

    notes = {"batch": 1, "image_tokens": side * side, "text_tokens": text, "double": double, "single": single}
    return Shape(model=model, inputs=inputs, notes=notes)


SHAPES = {
    "full": shape(),
    "shallow": shape(double=4, single=3),
    "smoke": shape(double=4, single=3, side=8, text=8, channels=16, **TINY),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen variants."""
    return run_script(
        "flux",
        __doc__,
        arguments,
        variants=VARIANTS,
        chosen=CHOSEN,
        shapes=SHAPES,
        plan=Plan(rows=ROWS, profiled="compiled"),
    )


if __name__ == "__main__":
    raise SystemExit(main())
