"""Mochi 1."""

from tread.attach.family import Family, Side, Stack

MOCHI = Family(
    models=("MochiTransformer3DModel",),
    # the table is (S, heads, D / 2) and takes a batch axis as it is; the attention mask covers text only
    stacks=(Stack(name="transformer_blocks", returns=0, image="first", sides=(Side(name="image_rotary_emb", dim=0),)),),
)
