"""Helios, alone and with the history of a long video."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_helios import HeliosTransformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

build = tiny(HeliosTransformer3DModel, attention_head_dim=12, rope_dim=(4, 4, 4))
# the keys of the history are scaled, the text is seen by all tokens, and history has the sample's timestep
amplified = partial(build, is_amplify_history=True, guidance_cross_attn=False, zero_history_timestep=False)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 3, 4, 6), (7, 16), (800, 300))  # 3 frames of 2 x 3 tokens


def history(batch: int) -> dict:
    """7 frames before: 6 tokens of the last one, 2 of the two before it and 1 of the four before those."""

    def frames(first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last).expand(batch, -1)

    return inputs(batch) | {
        "indices_hidden_states": frames(7, 10),
        "indices_latents_history_short": frames(6, 7),
        "indices_latents_history_mid": frames(4, 6),
        "indices_latents_history_long": frames(0, 4),
        "latents_history_short": random(3, batch, 4, 1, 4, 6),
        "latents_history_mid": random(4, batch, 4, 2, 4, 6),
        "latents_history_long": random(5, batch, 4, 4, 4, 6),
    }


case = partial(Case, build=build, blocks=(Blocks(name="blocks"),), tokens=18)
CASES = [
    case(name="helios", inputs=inputs),
    case(name="helios-history", inputs=history),
    case(name="helios-amplified", build=amplified, inputs=history),
]
