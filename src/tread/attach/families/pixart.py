"""PixArt alpha and sigma."""

from tread.attach.family import Family, Side, Stack

PIXART = Family(
    models=("PixArtTransformer2DModel",),
    # a mask over the image tokens is a bias (B, 1 or S, S) by the time layers see it; text stays outside the stream
    stacks=(
        Stack(
            name="transformer_blocks", sides=(Side(name="attention_mask", dim=1), Side(name="attention_mask", dim=2))
        ),
    ),
)
