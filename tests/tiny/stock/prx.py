"""PRX, with a text mask, and the 7B's resolution embedding without one."""

from functools import partial

from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel

from tests.tiny.case import Blocks, Case, tiny, usual, valid

build = tiny(PRXTransformer2DModel, context_in_dim=10, hidden_size=16, mlp_ratio=2, axes_dim=[4, 4])
build_7b = partial(build, bottleneck_size=6, resolution_embeds=True)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 8, 12), (5, 10))


def masked(batch: int) -> dict:
    return inputs(batch) | {"attention_mask": valid(batch, 5, 5, 3)}


case = partial(Case, blocks=(Blocks(name="blocks", image_queries=True),), tokens=24)
CASES = [case(name="prx", build=build, inputs=masked), case(name="prx-7b", build=build_7b, inputs=inputs)]
