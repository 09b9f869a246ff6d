"""Z-Image, and its omni mode.

Images and captions come as lists, one entry per sample, and each is padded to a multiple of 32 tokens. The padding
belongs to no image: it is kept, like the caption.
"""

import math

import torch
from torch import Tensor, nn

from tread.attach.family import Arguments, Family, Side, Stack

_MULTIPLE = 32


def _targets(arguments: Arguments) -> list[Tensor]:
    """The image to be denoised of each sample, (C, F, H, W); in omni mode it is the last of its images."""
    return [sample[-1] if isinstance(sample, list) else sample for sample in arguments["x"]]


def _length(image: Tensor, arguments: Arguments) -> int:
    size = arguments.get("patch_size", 2)
    frame = arguments.get("f_patch_size", 1)
    return (image.shape[-3] // frame) * (image.shape[-2] // size) * (image.shape[-1] // size)


def _padded(tokens: int) -> int:
    return math.ceil(tokens / _MULTIPLE) * _MULTIPLE


def _tokens(model: nn.Module, arguments: Arguments) -> int:
    return _length(_targets(arguments)[0], arguments)


def _offset(model: nn.Module, arguments: Arguments) -> Tensor:
    """Index of the target's first token: 0, or in omni mode after the captions and the images it refers to."""
    starts = []
    # the stock model leaves out captions beyond the images, which some scripts pass
    for sample, captions in zip(arguments["x"], arguments["cap_feats"], strict=False):
        start = 0
        if isinstance(sample, list):
            before = [len(caption) for caption in captions]
            before += [_MULTIPLE if image is None else _length(image, arguments) for image in sample[:-1]]
            start = sum(_padded(tokens) for tokens in before)
        starts.append(start)
    device = _targets(arguments)[0].device
    return torch.cat([torch.full((1,), start, device=device) for start in starts])  # (B,); a copy would wait


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    sizes = {tuple(target.shape[-3:]) for target in _targets(arguments)}
    if len(sizes) > 1:
        return f"the images have different sizes, {sorted(sizes)}, and all samples keep one number of tokens."
    return None


Z_IMAGE = Family(
    models=("ZImageTransformer2DModel",),
    stacks=(
        Stack(
            name="layers",
            stream="x",
            image="first",
            sides=(Side(name="attn_mask", dim=1), Side(name="freqs_cis", dim=1), Side(name="noise_mask", dim=1)),
        ),
    ),
    tokens=_tokens,
    offset=_offset,
    residuals=("controlnet_block_samples",),
    refuse=_refuse,
    notes="The images of a batch must have one size. In omni mode the images referred to are always kept. "
    "The refiners are no layers: they run dense.",
)
