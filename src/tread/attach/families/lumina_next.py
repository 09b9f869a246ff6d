"""Lumina-Next-T2I."""

from torch import nn

from tread.attach.family import Arguments, Family, Side, Stack


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    if (arguments.get("cross_attention_kwargs") or {}).get("base_sequence_length") is not None:
        return "base_sequence_length scales attention by the length of the stream, which routing changes."
    return None


LUMINA_NEXT = Family(
    models=("LuminaNextDiT2DModel",),
    stacks=(Stack(name="layers", sides=(Side(name="attention_mask", dim=1), Side(name="image_rotary_emb", dim=1))),),
    refuse=_refuse,
    notes="Proportional attention (base_sequence_length) cannot be routed.",
)
