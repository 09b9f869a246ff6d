"""The decoder of Spectrogram Diffusion, with two encodings of ragged length."""

import torch
from diffusers.models.transformers.t5_film_transformer import T5FilmDecoder

from tests.tiny.case import Blocks, Case, random


def build() -> T5FilmDecoder:
    return T5FilmDecoder(
        input_dims=4,
        targets_length=18,
        d_model=32,
        num_layers=3,
        num_heads=2,
        d_kv=16,
        d_ff=32,
        dropout_rate=0.0,
    )


def inputs(batch: int) -> dict:
    return {
        "decoder_input_tokens": random(1, batch, 18, 4),
        "encodings_and_masks": (
            (random(2, batch, 5, 32), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch]),
            (random(3, batch, 4, 32), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])[:batch]),
        ),
        "decoder_noise_time": torch.tensor([0.2, 0.8])[:batch],
    }


CASES = [
    Case(name="t5-film", build=build, inputs=inputs, blocks=(Blocks(name="decoders", returns=0),), tokens=18),
]
