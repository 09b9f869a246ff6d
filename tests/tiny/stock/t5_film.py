"""The decoder of Spectrogram Diffusion, with two encodings of ragged length."""

import torch
from diffusers.models.transformers.t5_film_transformer import T5FilmDecoder

from tests.tiny.case import Blocks, Case, random, tiny, valid

SIZES = {"input_dims": 4, "targets_length": 18, "d_model": 32, "d_kv": 16, "d_ff": 32}
build = tiny(T5FilmDecoder, **SIZES, dropout_rate=0.0)


def inputs(batch: int) -> dict:
    return {
        "decoder_input_tokens": random(1, batch, 18, 4),
        "encodings_and_masks": (
            (random(2, batch, 5, 32), valid(batch, 5, 3, 5).long()),
            (random(3, batch, 4, 32), valid(batch, 4, 2, 1).long()),
        ),
        "decoder_noise_time": torch.tensor([0.2, 0.8])[:batch],
    }


BLOCKS = (Blocks(name="decoders", returns=0),)
CASES = [Case(name="t5-film", build=build, inputs=inputs, blocks=BLOCKS, tokens=18)]
