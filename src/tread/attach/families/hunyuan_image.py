"""HunyuanImage 2.1 and its refiner."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack

# keys are image tokens first, then text; the table covers image tokens only
_SIDES = (Side(name="attention_mask", dim=3), Side(name="image_rotary_emb", dim=0))

HUNYUAN_IMAGE = Family(
    models=("HunyuanImageTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=0, image="first", sides=_SIDES),
        Stack(name="single_transformer_blocks", returns=0, image="first", sides=_SIDES),
    ),
    rotary=(SHARED_ROTARY,),
)
