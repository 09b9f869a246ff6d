"""AuraFlow."""

from functools import partial

from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel

from tests.tiny.case import Blocks, Case, tiny, usual

BLOCKS = (Blocks(name="joint_transformer_blocks", returns=1), Blocks(name="single_transformer_blocks"))
SIZES = {"sample_size": 8, "attention_head_dim": 8, "joint_attention_dim": 12, "pos_embed_max_size": 36}
build = tiny(AuraFlowTransformer2DModel, **SIZES, num_mmdit_layers=2, num_single_dit_layers=2)
# the inner window opens where text is joined already
single = partial(build, num_mmdit_layers=1, num_single_dit_layers=3)

case = partial(Case, inputs=partial(usual, image=(4, 8, 12), text=(5, 12)), blocks=BLOCKS, tokens=24)
CASES = [case(name="auraflow", build=build), case(name="auraflow-single", build=single)]
