"""PixArt alpha and sigma."""

from tread.attach.family import Family, Stack, square

PIXART = Family(
    models=("PixArtTransformer2DModel",),
    # a mask over the image tokens is a bias (B, 1 or S, S) by the time layers see it; text stays outside the stream
    stacks=(Stack(name="transformer_blocks", sides=square("attention_mask", 1, 2)),),
)
