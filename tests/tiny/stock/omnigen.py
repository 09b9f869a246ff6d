"""OmniGen: text to image, and with input images."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_omnigen import OmniGenTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny

TEXT = 7
SIZES = {"num_key_value_heads": 2, "vocab_size": 20, "time_step_dim": 16}
FACTORS = {"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))}
build = tiny(OmniGenTransformer2DModel, **SIZES, pad_token_id=0, rope_scaling=FACTORS)


def inputs(batch: int) -> dict:
    """Text is causal, the time token and the image see everything; the second prompt is padded on the left."""
    length = TEXT + 1 + 15
    mask = torch.ones(length, length).tril()
    mask[TEXT + 1 :, TEXT + 1 :] = 1
    mask = mask.expand(2, -1, -1).clone()
    mask[1, :, :2] = 0
    mask[1, :2, :2] = torch.eye(2)
    return {
        "hidden_states": random(1, batch, 4, 6, 10),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "input_ids": (torch.arange(2 * TEXT).view(2, TEXT) + 1)[:batch],
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask[:batch],
        # stock OmniGen turns all samples by the first one's positions; a shift, as of padding, makes no difference
        "position_ids": (torch.arange(length) - torch.tensor([[0], [2]])).clamp(min=0)[:batch],
    }


class Places(list):
    """The input images' places by sample: the model reads it as a mapping, the contract cuts it as a list."""

    def keys(self) -> range:
        return range(len(self))

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Places(found) if isinstance(index, slice) else found


def edit(batch: int) -> dict:
    """An input image of 2 x 2 patches in each prompt."""
    more = {
        "input_img_latents": [latent.unsqueeze(0) for latent in random(2, batch, 4, 4, 4)],
        "input_image_sizes": Places([[[1, 5]], [[3, 7]]][:batch]),
    }
    return inputs(batch) | more


case = partial(Case, build=build, blocks=(Blocks(name="layers"),), tokens=15)
CASES = [case(name="omnigen", inputs=inputs), case(name="omnigen-edit", inputs=edit)]
