"""CogVideoX 1.0 and 1.5, and ConsisID."""

from dataclasses import replace

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack

COGVIDEOX = Family(
    models=("CogVideoXTransformer3DModel",),
    stacks=(Stack(name="transformer_blocks", returns=0, sides=(Side(name="image_rotary_emb", dim=0),)),),
    rotary=(SHARED_ROTARY,),
)

# a cross-attention to the face is added to every token between layers
CONSISID = replace(COGVIDEOX, models=("ConsisIDTransformer3DModel",), residuals=("id_cond",))
