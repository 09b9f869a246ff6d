"""ACE-Step 1.5: layers with a sliding window and layers without take turns; an odd length is padded."""

import torch
from diffusers.models.transformers.ace_step_transformer import AceStepTransformer1DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

SIZES = {"num_hidden_layers": 4, "in_channels": 10, "audio_acoustic_hidden_dim": 4, "encoder_hidden_size": 12}
build = tiny(AceStepTransformer1DModel, **SIZES, sliding_window=3)


def inputs(batch: int) -> dict:
    more = {"timestep_r": torch.tensor([0.1, 0.8])[:batch], "context_latents": random(3, batch, 35, 6)}
    return usual(batch, (35, 4), (5, 12)) | more


CASES = [Case(name="ace-step", build=build, inputs=inputs, blocks=(Blocks(name="layers"),), tokens=18)]
