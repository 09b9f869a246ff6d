"""DiT, class-conditional."""

from tread.attach.family import Family, Stack

DIT = Family(models=("DiTTransformer2DModel",), stacks=(Stack(name="transformer_blocks"),))
