"""The families of stock models, one file each, and the classes that cannot be routed, with the reason.

A file declares data and small functions of a forward's arguments. It imports torch, `tread.attach.family` and other
families; never the model's library. Every `Family` that a file here declares is registered by being there.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from tread.attach.families.dit_sit import DIT_SIT, DIT_SIT_REPA
from tread.attach.families.flux_bfl import FLUX_BFL, FLUX_BFL_CONTROLLED, FLUX_BFL_CONTROLLED_BOTH
from tread.attach.families.wan_model import WAN_MODEL
from tread.attach.family import Family

ELSEWHERE: tuple[Family, ...] = (
    *(FLUX_BFL_CONTROLLED_BOTH, FLUX_BFL_CONTROLLED, FLUX_BFL),
    *(DIT_SIT_REPA, DIT_SIT),
    WAN_MODEL,
)
"""Families of models outside diffusers. Several may name one class; the first that fits the model is taken."""


def _declared() -> Iterator[Family]:
    for module in iter_modules(__path__, f"{__name__}."):
        values = vars(import_module(module.name)).values()
        yield from (value for value in values if isinstance(value, Family) and value not in ELSEWHERE)


FAMILIES: tuple[Family, ...] = tuple(_declared())
"""Families of diffusers' models, in the order of their files' names."""

REFUSED: dict[str, str] = {
    "AnyFlowFARTransformer3DModel": (
        "its attention is a block mask over whole chunks of frames, built for the full stream in blocks of 128 tokens."
    ),
    "DualTransformer2DModel": (
        "it runs two transformers side by side on a U-Net's feature map and mixes what they return, so its layers do "
        "not follow one another on one stream."
    ),
    "Kandinsky6SRTransformer3DModel": (
        "its attention is always sparse: it groups the stream into blocks of 64 tokens, squares of the grid, and "
        "attends by block."
    ),
    "LatteTransformer3DModel": (
        "its layers attend within frames and through time by turns; a selection leaves every frame another length."
    ),
    "MiniMaxMusic3RVQDepthDecoder": ("it is no denoiser: it predicts the codes of one audio frame one after another."),
    "PriorTransformer": ("it denoises one embedding, not a stream of tokens: nothing in its sequence can be dropped."),
    "SanaTransformer2DModel": (
        "its feed-forward convolves over the grid of tokens, so each layer needs every token in place."
    ),
    "SanaVideoTransformer3DModel": (
        "its feed-forward convolves over the grid of tokens and through time, so each layer needs every token in place."
    ),
    "SanaWMTransformer3DModel": (
        "its feed-forward convolves over the grid of tokens and its attention is a recurrence over whole frames."
    ),
    "TransformerTemporalModel": (
        "it is a part of a U-Net whose sequences are the few frames at one pixel, not the tokens of a sample."
    ),
    "WanAnimate2Transformer3DModel": (
        "its layers rotate the stream and pack it for a block mask by its grid of frames, rows and columns."
    ),
}
"""Class name -> the reason why it cannot be routed."""
