"""DiT, class-conditional."""

import torch
from diffusers.models.embeddings import LabelEmbedding
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny


def build() -> DiTTransformer2DModel:
    sizes = {"attention_head_dim": 8, "out_channels": 8, "sample_size": 10}
    model = tiny(DiTTransformer2DModel, **sizes, num_embeds_ada_norm=10)()
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            # in training every layer draws the labels it drops: two forwards would differ, routed or not
            module.dropout_prob = 0.0
    return model


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 10, 10),  # the stock class takes square images only
        "timestep": torch.tensor([200, 800])[:batch],
        "class_labels": torch.tensor([3, 7])[:batch],
    }


CASES = [Case(name="dit", build=build, inputs=inputs, blocks=(Blocks(name="transformer_blocks"),), tokens=25)]
