"""MiniMax-H3: text, a condition's rows, audio and video in one packed stream of one sample."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny

TEXT, AUDIO = 5, 4
SIZES = {"hidden_size": 24, "in_channels": 2, "audio_in_channels": 6, "text_dim": 12}
TIMES = {"freq_dim": 8, "time_embed_hidden_dim": 16, "time_embed_dim": 8, "rope_freq_dim": 2}
build = tiny(MiniMaxH3Transformer3DModel, **SIZES, **TIMES)


def grid(frames: int, rows: int, columns: int) -> torch.Tensor:
    axes = torch.meshgrid(*(torch.arange(n).float() for n in (frames, rows, columns)), indexing="ij")
    return torch.stack(axes, dim=-1).view(-1, 3)


def packed(conditions: int, batch: int = 1) -> dict:
    """Text, then the rows of some condition frames, then audio, then three frames of video."""
    clean, rows = conditions * 6, 18
    first = TEXT + clean + AUDIO
    total = first + rows
    audio = torch.arange(TEXT + clean, first)
    video = torch.cat([torch.arange(TEXT, TEXT + clean), torch.arange(first, total)])
    steps = torch.zeros(total, dtype=torch.int64)  # 0: video to denoise, 1: audio, 2: given
    steps[audio], steps[:TEXT], steps[TEXT : TEXT + clean] = 1, 2, 2
    tags = torch.zeros(total, dtype=torch.int64)
    tags[:TEXT], tags[audio] = 1, 2
    positions = torch.zeros(total, 3)
    positions[:TEXT, 0], positions[audio, 0] = torch.arange(TEXT).float(), TEXT + torch.arange(AUDIO).float()
    positions[video] = torch.cat([grid(conditions, 2, 3), grid(3, 2, 3)]) + TEXT
    return {
        "hidden_states": random(1, batch, clean + rows, 8),
        "audio_hidden_states": random(2, batch, AUDIO, 6),
        "encoder_hidden_states": random(3, batch, TEXT, 12),
        "timestep": torch.tensor([0.3, 0.6, 1.0]),
        "timestep_indices": steps,
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": torch.arange(TEXT),
    }


def condition_and_video(batch: int) -> list[list[int]]:
    """The positions of a condition's frame and of the video, around the audio."""
    return [[*range(TEXT, TEXT + 6), *range(TEXT + 6 + AUDIO, TEXT + 6 + AUDIO + 18)]]


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), batch=1)
conditioned = partial(case, tokens=24, offsets=condition_and_video, references=6, references_at="first")
CASES = [
    case(name="minimax-h3", inputs=lambda batch: packed(0), tokens=18, refused=lambda model, batch: packed(0, batch=2)),
    conditioned(name="minimax-h3-conditions", inputs=lambda batch: packed(1)),
]
