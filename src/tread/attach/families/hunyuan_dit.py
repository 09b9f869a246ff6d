"""Hunyuan-DiT."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack

HUNYUAN_DIT = Family(
    models=("HunyuanDiT2DModel",),
    stacks=(Stack(name="blocks", sides=(Side(name="image_rotary_emb", dim=0), Side(name="skip", dim=1))),),
    # the stream after each layer of the first half comes back as `skip` in the second
    per_block=True,
    rotary=(SHARED_ROTARY,),
)
