"""Kandinsky 6: video, with or without audio, and a reference frame for image to video."""

from typing import Any

from torch import Tensor

from tread.attach.family import Arguments, Family, Side, Stack, patches, setting


def _references(model: Any, arguments: Arguments) -> int | Tensor:
    """Reference frames come last and have a token type of their own."""
    types = arguments.get("visual_token_type_ids")
    if types is None:
        return 0
    height, width = (
        size // patch
        for size, patch in zip(arguments["hidden_states"].shape[2:4], model.config.patch_size[1:], strict=True)
    )
    return (types[0] > 0).sum() * (height * width)


KANDINSKY6 = Family(
    models=("Kandinsky6Transformer3DModel",),
    stacks=(
        # the audio tokens are a stream of their own and all stay
        Stack(name="visual_transformer_blocks", stream="vis", returns=0, sides=(Side(name="vis_rope", dim=0),)),
    ),
    tokens=patches("hidden_states", 1, 2, 3, size=setting("config.patch_size")),
    references=_references,
    notes="Layers are the fused ones; video tokens are routed, audio tokens are not.",
)
