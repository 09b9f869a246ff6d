"""The transformer of a U-Net's attention stage, which also was the first form of DiT and PixArt; and DreamLite's."""

from tread.attach.family import Family, Side, Stack

TRANSFORMER_2D = Family(
    models=("DreamLiteTransformer2DModel", "Transformer2DModel"),
    # a mask over the image tokens: (B, S) in DreamLite, else a bias (B, 1 or S, S)
    stacks=(
        Stack(
            name="transformer_blocks",
            sides=(Side(name="attention_mask", dim=1), Side(name="attention_mask", dim=2, ndim=3)),
        ),
    ),
    notes="Inside a U-Net, attach to each of its transformers.",
)
