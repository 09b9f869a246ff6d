"""CogView3-Plus."""

from tread.attach.family import Family, Stack

COGVIEW3 = Family(models=("CogView3PlusTransformer2DModel",), stacks=(Stack(name="transformer_blocks", returns=0),))
