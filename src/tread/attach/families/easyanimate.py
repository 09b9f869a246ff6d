"""EasyAnimate 5 and 5.1: text to video, inpainting and control."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack

EASYANIMATE = Family(
    models=("EasyAnimateTransformer3DModel",),
    stacks=(Stack(name="transformer_blocks", returns=0, sides=(Side(name="image_rotary_emb", dim=0),)),),
    rotary=(SHARED_ROTARY,),
)
