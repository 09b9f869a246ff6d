"""HunyuanVideo Framepack: history at three scales, two of them padded."""

import torch
from diffusers.models.transformers.transformer_hunyuan_video_framepack import HunyuanVideoFramepackTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT, IMAGE = 5, 3


def build() -> HunyuanVideoFramepackTransformer3DModel:
    return HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=12,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": torch.tensor([200, 800])[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])[:batch],
        "pooled_projections": random(3, batch, 8),
        "image_embeds": random(4, batch, IMAGE, 8),
        "indices_latents": torch.arange(9, 12),
        "guidance": torch.full((batch,), 6000.0),
        "latents_clean": random(5, batch, 4, 1, 4, 6),
        "indices_latents_clean": torch.tensor([0]),
        "latents_history_2x": random(6, batch, 4, 3, 4, 6),
        "indices_latents_history_2x": torch.arange(6, 9),
        "latents_history_4x": random(7, batch, 4, 5, 4, 6),
        "indices_latents_history_4x": torch.arange(1, 6),
    }


BLOCKS = (
    Blocks(name="transformer_blocks", returns=0, image="first", keys="first"),
    Blocks(name="single_transformer_blocks", returns=0, image="first", keys="first"),
)
# 6 tokens of the clean frame, 2 * 1 * 2 at half the scale, 2 * 1 * 1 at a quarter, then 18 to denoise
CASES = [
    Case(
        name="hunyuanvideo-framepack",
        build=build,
        inputs=inputs,
        blocks=BLOCKS,
        tokens=30,
        references=12,
        references_at="first",
    ),
]
