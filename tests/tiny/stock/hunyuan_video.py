"""HunyuanVideo; 1.5 with an image and without (embeddings of zero); Framepack, history at three scales, two padded."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video_framepack import HunyuanVideoFramepackTransformer3DModel

from tests.tiny.case import GRAPHS, Blocks, Case, random, tiny, usual, valid

TEXT = 5
SIZES = {"num_layers": 2, "mlp_ratio": 2.0, "pooled_projection_dim": 8}
build = tiny(HunyuanVideoTransformer3DModel, **SIZES)
token_replace = partial(build, image_condition_type="token_replace")
latent_concat = partial(build, in_channels=9, image_condition_type="latent_concat", guidance_embeds=False)
build_15 = tiny(HunyuanVideo15Transformer3DModel, mlp_ratio=2.0, text_embed_2_dim=10, image_embed_dim=8)
HISTORY = {"has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True}
build_framepack = tiny(HunyuanVideoFramepackTransformer3DModel, **SIZES, **HISTORY)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 3, 4, 6), (TEXT, 12), (200, 800)) | {
        "encoder_attention_mask": valid(batch, TEXT, 2, 4).long(),
        "pooled_projections": random(3, batch, 8),
        "guidance": torch.full((batch,), 6000.0),
    }


def concat_inputs(batch: int) -> dict:
    return inputs(batch) | {"hidden_states": random(1, batch, 9, 3, 4, 6), "guidance": None}


def inputs_15(batch: int) -> dict:
    return usual(batch, (4, 3, 2, 3), (TEXT, 12), (200.0, 800.0)) | {
        "encoder_attention_mask": valid(batch, TEXT, 3, 5).long(),
        "encoder_hidden_states_2": random(3, batch, 4, 10),
        "encoder_attention_mask_2": valid(batch, 4, 4, 1).long(),
        "image_embeds": random(4, batch, 2, 8),
    }


def text_only(batch: int) -> dict:
    more = {"image_embeds": torch.zeros(batch, 2, 8), "timestep_r": torch.tensor([100.0, 300.0])[:batch]}
    return inputs_15(batch) | more


def history(batch: int) -> dict:
    """6 tokens of the clean frame, 2 * 1 * 2 at half the scale, 2 * 1 * 1 at a quarter, then 18 to denoise."""
    return inputs(batch) | {
        "encoder_attention_mask": valid(batch, TEXT, 3, 4).long(),
        "image_embeds": random(4, batch, 3, 8),
        "indices_latents": torch.arange(9, 12),
        "latents_clean": random(5, batch, 4, 1, 4, 6),
        "indices_latents_clean": torch.tensor([0]),
        "latents_history_2x": random(6, batch, 4, 3, 4, 6),
        "indices_latents_history_2x": torch.arange(6, 9),
        "latents_history_4x": random(7, batch, 4, 5, 4, 6),
        "indices_latents_history_4x": torch.arange(1, 6),
    }


DOUBLE = Blocks(name="transformer_blocks", returns=0, image="first", keys="first")
BLOCKS = (DOUBLE, Blocks(name="single_transformer_blocks", returns=0, image="first", keys="first"))
case = partial(Case, build=build, blocks=BLOCKS, tokens=18)
case_15 = partial(case, blocks=(DOUBLE,), defects=GRAPHS)
framepack = partial(case, build=build_framepack, tokens=30, references=12, references_at="first")
CASES = [
    case(name="hunyuanvideo", inputs=inputs),
    case(name="hunyuanvideo-token-replace", build=token_replace, inputs=inputs, pinned=6),
    case(name="hunyuanvideo-latent-concat", build=latent_concat, inputs=concat_inputs),
    case_15(name="hunyuanvideo15", build=build_15, inputs=inputs_15),
    case_15(name="hunyuanvideo15-t2v-meanflow", build=partial(build_15, use_meanflow=True), inputs=text_only),
    framepack(name="hunyuanvideo-framepack", inputs=history),
]
