"""Cosmos 3: a video, a video after its first frame, and a video with sound. A forward takes one sample."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer

from tests.tiny.case import Blocks, Case, random, tiny

TEXT, SOUND = 5, 4
FRAMES, ROWS, COLUMNS = 3, 2, 3
TOKENS = FRAMES * ROWS * COLUMNS
SIZES = {"num_hidden_layers": 3, "latent_channel": 4, "patch_latent_dim": 16, "rope_axes_dim": [4, 2, 2]}
build = tiny(Cosmos3OmniTransformer, **SIZES, rope_theta=100.0, vocab_size=11)
with_sound = partial(build, sound_gen=True, sound_dim=6)
nemotron = partial(with_sound, hidden_act="relu2", qk_norm_for_text=False, use_und_k_norm_for_gen=True)


def video(clean: int, after: int = 0) -> dict:
    """The arguments of a video whose first `clean` frames are given, with `after` tokens after it."""
    noisy = torch.arange(clean, FRAMES)
    frame = ROWS * COLUMNS
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) for n in (FRAMES, ROWS, COLUMNS)), indexing="ij")).flatten(1)
    positions = [torch.arange(TEXT).expand(3, -1), grid + TEXT, torch.arange(after).expand(3, -1) + TEXT]
    return {
        "input_ids": torch.tensor([3, 1, 4, 1, 5]),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.cat(positions, dim=1),
        "und_len": TEXT,
        "sequence_length": TEXT + TOKENS + after,
        "vision_tokens": [random(1, 1, 4, FRAMES, 2 * ROWS, 2 * COLUMNS)],
        "vision_token_shapes": [(FRAMES, ROWS, COLUMNS)],
        "vision_sequence_indexes": torch.arange(TEXT, TEXT + TOKENS),
        "vision_mse_loss_indexes": torch.arange(TEXT + clean * frame, TEXT + TOKENS),
        "vision_timesteps": torch.full(((FRAMES - clean) * frame,), 300.0),
        "vision_noisy_frame_indexes": [noisy],
    }


def sounding(batch: int) -> dict:
    first = TEXT + TOKENS
    return video(0, after=SOUND) | {
        "sound_tokens": [random(2, 1, 6, SOUND)[0]],
        "sound_token_shapes": [(SOUND, 1, 1)],
        "sound_sequence_indexes": torch.arange(first, first + SOUND),
        "sound_mse_loss_indexes": torch.arange(first, first + SOUND),
        "sound_timesteps": torch.full((SOUND,), 300.0),
        "sound_noisy_frame_indexes": [torch.arange(SOUND)],
    }


def blocks(keys: Any) -> tuple[Blocks, ...]:
    """Keys are the text's, then the stream's."""
    layout: dict[str, Any] = {"stream": 1, "keyword": "gen_seq", "returns": 1, "dim": 0}
    return (Blocks(name="layers", image="first", keys=keys, cached=TEXT, **layout),)


DEFECTS = {"autocast": "the stock forward adds float32 timestep embeddings to tokens that autocast made bfloat16"}
case = partial(Case, build=build, blocks=blocks("last"), batch=1, tokens=TOKENS, defects=DEFECTS)
given = partial(case, references=ROWS * COLUMNS, references_at="first")
CASES = [
    case(name="cosmos3", inputs=lambda batch: video(0)),
    case(name="cosmos3-sound", build=nemotron, inputs=sounding, blocks=blocks(TEXT)),
    given(name="cosmos3-first-frame", inputs=lambda batch: video(1)),
]
