"""FLUX.1 dev, schnell, Fill and Kontext."""

from torch import Tensor, nn

from tread.attach.families.flux2 import SIDES
from tread.attach.family import Arguments, Family, Rotary, Stack, length


def kontext_references(model: nn.Module, arguments: Arguments) -> int | Tensor:
    """Kontext appends the reference images' tokens; their ids say so in the first column."""
    ids = arguments.get("img_ids")
    if ids is None:
        return 0
    ids = ids[0] if ids.ndim == 3 else ids
    return (ids[:, 0] > 0).sum()


FLUX = Family(
    models=("FluxTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=SIDES),
        Stack(name="single_transformer_blocks", returns=1, sides=SIDES),
    ),
    tokens=length("hidden_states"),
    references=kontext_references,
    residuals=("controlnet_block_samples", "controlnet_single_block_samples"),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_flux.apply_rotary_emb", axis=1),),
    notes="Kontext's reference tokens are kept unless reference_tokens is 'route'.",
)
