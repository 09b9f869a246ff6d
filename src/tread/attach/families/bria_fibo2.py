"""Fibo 2."""

from typing import Any

import torch
from torch import Tensor

from tread.attach.family import Arguments, Family, Side, Stack


def _patches(model: Any, latents: Tensor) -> int:
    patch = model.config.patch_size
    return (latents.shape[2] // patch) * (latents.shape[3] // patch)


def _references(model: Any, arguments: Arguments) -> int:
    """The context images' tokens follow the target's."""
    return sum(_patches(model, latents) for latents in arguments.get("context_latents") or ())


def _tokens(model: Any, arguments: Arguments) -> int:
    return _patches(model, arguments["hidden_states"]) + _references(model, arguments)


def _offset(model: Any, arguments: Arguments) -> Tensor:
    """The gist tokens come first if every sample has equally many, else last; the text's length says how many."""
    config, latents = model.config, arguments["hidden_states"]
    mask = arguments.get("encoder_attention_mask")
    if mask is None:
        words = torch.full(latents.shape[:1], arguments["encoder_hidden_states"].shape[2], device=latents.device)
    else:
        words = mask.sum(dim=1)  # (B,)
    span = config.gist_max_text_len - config.gist_min_text_len
    share = ((words.double() - config.gist_min_text_len) / span).clamp(0, 1)  # double, as the model counts
    gist = config.min_num_gist_tokens + share * (config.max_num_gist_tokens - config.min_num_gist_tokens)
    gist = (gist / config.gist_step).ceil().long() * config.gist_step
    gist = gist.clamp(config.min_num_gist_tokens, config.max_num_gist_tokens)  # (B,)
    return torch.where((gist == gist[0]).all(), gist, 0)


BRIA_FIBO2 = Family(
    models=("BriaFibo2Transformer2DModel",),
    stacks=(
        Stack(
            name="layers",
            stream="x",
            sides=(Side(name="attn_mask", dim=1), Side(name="freqs_cis", dim=1), Side(name="noise_mask", dim=1)),
        ),
    ),
    tokens=_tokens,
    offset=_offset,
    references=_references,
    notes="Context images are kept unless reference_tokens is 'route'.",
)
