"""Z-Image shapes: one image of 4096 tokens with 256 text tokens; measured by benchmarks.buckets."""

from typing import Any

import torch

from benchmarks.common.lora import Shape


def shape(*, layers: int = 30, side: int = 64, text: int = 256, channels: int = 16, **config: Any) -> Shape:
    """Z-Image with so many layers on `side` x `side` tokens; `config` is what else differs from the released one."""

    def model() -> torch.nn.Module:
        from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel

        return ZImageTransformer2DModel(n_layers=layers, in_channels=channels, **config)

    def inputs(device: torch.device, rows: int = side, columns: int = side, text: int = text) -> dict[str, Any]:
        wide = config.get("cap_feat_dim", 2560)
        return {
            "x": [torch.randn(channels, 1, 2 * rows, 2 * columns, device=device)],
            "t": torch.full((1,), 0.5, device=device),
            "cap_feats": [torch.randn(text, wide, device=device)],
        }

    notes = {"batch": 1, "image_tokens": side * side, "text_tokens": text, "layers": layers}
    return Shape(model=model, inputs=inputs, notes=notes)


TINY = {"dim": 32, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [4, 6, 6], "cap_feat_dim": 32}
SHAPES = {"full": shape(), "shallow": shape(layers=6), "smoke": shape(layers=6, side=8, text=8, channels=4, **TINY)}
