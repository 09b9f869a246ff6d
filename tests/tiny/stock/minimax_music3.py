"""MiniMax Music 3: the timestep's token before the audio tokens."""

from functools import partial

from diffusers.models.transformers.transformer_minimax_music3 import MiniMaxMusic3Transformer1DModel

from tests.tiny.case import Blocks, Case, tiny, usual

SIZES = {"condition_dim": 6, "ff_inner_dim": 32, "rotary_dim": 8, "fourier_embedding_dim": 8}
build = tiny(MiniMaxMusic3Transformer1DModel, **SIZES)
INPUTS = partial(usual, image=(4, 18), text=(18, 6))
BLOCKS = (Blocks(name="transformer_blocks"),)
CASES = [Case(name="minimax-music3", build=build, inputs=INPUTS, blocks=BLOCKS, tokens=18)]
