"""Motif-Video."""

from tread.attach.family import Family, Rotary, Side, Stack

# keys are image tokens first; the table covers image tokens only
_SIDES = (Side(name="attention_mask", dim=3), Side(name="image_rotary_emb", dim=0))

MOTIF_VIDEO = Family(
    models=("MotifVideoTransformer3DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=0, image="first", sides=_SIDES),
        Stack(name="single_transformer_blocks", returns=0, image="first", sides=_SIDES),
    ),
    # the last single layers, the decoder, start a new stream and read the old one, which must be at full length
    per_block=True,
    rotary=(Rotary(function="diffusers.models.transformers.transformer_motif_video.apply_rotary_emb", axis=2),),
    notes="In the decoder's layers all tokens of the encoder stay.",
)
