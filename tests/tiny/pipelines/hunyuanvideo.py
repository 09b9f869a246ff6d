"""HunyuanVideo 1.5 of text and of a first frame."""

import importlib
from functools import partial
from typing import Any

from tests.tiny.autoencoders import hunyuan15_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, first_frame
from tests.tiny.text_encoders import byt5_text, qwen_text, siglip_vision
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.weights import randomised


def build(pipeline: str = "HunyuanVideo15Pipeline", *, image: bool = False) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    transformers: Any = importlib.import_module("transformers")
    sizes = {"in_channels": 9, "out_channels": 4, "num_layers": 4, "num_refiner_layers": 1, "target_size": 64}
    texts = {"text_embed_dim": 16, "text_embed_2_dim": 16, "image_embed_dim": 16}
    transformer = tiny(diffusers.HunyuanVideo15Transformer3DModel, **sizes, **texts)()
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=hunyuan15_autoencoder(),
        text_encoder=qwen_text(alone=True, layers=3),
        tokenizer=qwen_tokenizer(),
        text_encoder_2=byt5_text(),
        tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=randomised(transformer, scale=1.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **(siglip_vision() if image else {}),
    )


hunyuan = partial(
    Tiny,
    family="hunyuanvideo",
    embedder="x_embedder",
    frames=5,
    reads_values="texts are cut by their masks",
    text=(
        *("encoder_hidden_states", "encoder_attention_mask"),
        *("encoder_hidden_states_2", "encoder_attention_mask_2"),
    ),
)
CASES = [
    hunyuan(name="hunyuanvideo", build=build),
    hunyuan(
        name="hunyuanvideo-i2v",
        build=partial(build, "HunyuanVideo15ImageToVideoPipeline", image=True),
        size=(64, 64),  # the pipeline chooses the size
        arguments=first_frame,
    ),
]
