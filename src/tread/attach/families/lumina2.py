"""Lumina-Image 2.0."""

from torch import Tensor, nn

from tread.attach.family import Arguments, Family, Side, Stack, patches, setting


def _caption_length(model: nn.Module, arguments: Arguments) -> Tensor:
    """Each sample's image tokens follow its own caption; padding comes after them."""
    return arguments["encoder_attention_mask"].sum(dim=1)  # (B,)


LUMINA2 = Family(
    models=("Lumina2Transformer2DModel",),
    stacks=(Stack(name="layers", sides=(Side(name="attention_mask", dim=1), Side(name="image_rotary_emb", dim=1))),),
    tokens=patches("hidden_states", -2, -1, size=setting("config.patch_size")),
    offset=_caption_length,
    notes="The refiners are no layers: they run dense.",
)
