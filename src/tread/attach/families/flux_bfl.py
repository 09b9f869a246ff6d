"""FLUX.1 and Chroma in the layout of Black Forest Labs' own code, which many trainers derive from.

A mask over text alone, (B, T), is no side input: layers lengthen it by the image tokens they see.
"""

from dataclasses import replace

from tread.attach.families.flux import kontext_references
from tread.attach.family import Family, Side, Stack, length


def _mask(name: str) -> tuple[Side, ...]:
    """A mask over queries and keys, (B, L, L) or (B, heads or 1, L or 1, L), which some versions pass."""
    axes = ((1, 3), (2, 3), (2, 4), (3, 4))
    return tuple(Side(name=name, dim=dim, ndim=ndim, optional=True) for dim, ndim in axes)


# text comes first in the table, (B, 1, T + S, D / 2, 2, 2), and in masks
_SIDES = (Side(name="pe", dim=2), *_mask("attn_mask"), *_mask("attention_mask"), *_mask("mask"))

FLUX_BFL = Family(
    models=("Flux", "Chroma"),
    parts=("img_in", "txt_in", "pe_embedder", "final_layer"),
    stacks=(
        Stack(name="double_blocks", stream="img", returns=0, sides=_SIDES),
        Stack(name="single_blocks", stream="x", sides=_SIDES),
    ),
    inputs=("img", "img_ids"),
    tokens=length("img"),
    references=kontext_references,
    notes="Reference tokens (Kontext: their first id is above 0) are kept unless reference_tokens is 'route'.",
)

# ControlNet's residuals, in the names of trainers that take them
FLUX_BFL_CONTROLLED = replace(FLUX_BFL, residuals=("block_controlnet_hidden_states",))
FLUX_BFL_CONTROLLED_BOTH = replace(
    FLUX_BFL, residuals=("block_controlnet_hidden_states", "block_controlnet_single_hidden_states")
)
