"""Cosmos Predict 2.5 of text. No padding mask: the stock model would need torchvision."""

import importlib
from typing import Any

from tests.tiny.autoencoders import wan_autoencoder
from tests.tiny.case import tiny
from tests.tiny.guardrail import Guardrail
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import qwen_text
from tests.tiny.tokenizers import CHAT, qwen_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 17, "out_channels": 16, "num_layers": 4, "adaln_lora_dim": 8, "text_embed_dim": 16}
    texts = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 32, "encoder_hidden_states_channels": 16}
    grid = {"max_size": (8, 16, 16), "patch_size": (1, 2, 2), "extra_pos_embed_type": None}
    make = tiny(diffusers.CosmosTransformer3DModel, **sizes, **texts, **grid, concat_padding_mask=False)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHAT.replace("message['content']", "message['content'][0]['text']")
    tokenizer.pad_token = "<|endoftext|>"
    return diffusers.Cosmos2_5_PredictBasePipeline(
        scheduler=diffusers.UniPCMultistepScheduler(
            use_karras_sigmas=True,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
            sigma_max=200,
            sigma_min=0.01,
        ),
        vae=wan_autoencoder(),
        text_encoder=qwen_text(),
        tokenizer=tokenizer,
        transformer=randomised(make()),
        safety_checker=Guardrail(),
    )


CASES = [
    Tiny(
        name="cosmos25",
        family="cosmos25",
        build=build,
        embedder="transformer_blocks.0.norm1.norm",
        frames=5,
        one_time=True,
        whole_steps=True,
    )
]
