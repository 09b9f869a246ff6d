"""CogVideoX 1.0 and 1.5, and ConsisID."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack

COGVIDEOX = Family(
    models=("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
    stacks=(Stack(name="transformer_blocks", returns=0, sides=(Side(name="image_rotary_emb", dim=0),)),),
    # ConsisID adds a cross-attention to the face to every token between layers
    residuals=("id_cond",),
    rotary=(SHARED_ROTARY,),
)
