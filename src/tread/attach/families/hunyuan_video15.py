"""HunyuanVideo 1.5: text and image to video."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack

HUNYUAN_VIDEO15 = Family(
    models=("HunyuanVideo15Transformer3DModel",),
    # the attention mask covers text only; layers pad it to the length of the stream they are given
    stacks=(Stack(name="transformer_blocks", returns=0, image="first", sides=(Side(name="freqs_cis", dim=0),)),),
    rotary=(SHARED_ROTARY,),
)
