"""FLUX.2 and FLUX.2 Klein."""

from torch import Tensor, nn

from tread.attach.family import Arguments, Family, Rotary, Side, Stack, length, square

SIDES = (
    # the table covers text and image tokens, text first, in both stacks
    Side(name="image_rotary_emb", dim=0),
    # a mask over keys, or over queries and keys
    *square("joint_attention_kwargs.attention_mask", 3, 2, ndim=4),
)


def later_images(model: nn.Module, arguments: Arguments) -> Tensor:
    """Reference images follow the target; the first column of their ids is another than the target's."""
    ids = arguments["img_ids"]
    ids = ids[0] if ids.ndim == 3 else ids
    return (ids[:, 0] != ids[0, 0]).sum()


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    if arguments.get("kv_cache_mode") is None:
        return None
    return "its key-value cache for sampling keeps and slices all the reference tokens in every layer."


FLUX2 = Family(
    models=("Flux2Transformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=SIDES),
        Stack(name="single_transformer_blocks", sides=SIDES),  # text and image tokens joined, text first
    ),
    tokens=length("hidden_states"),
    references=later_images,
    rotary=(Rotary(function="diffusers.models.transformers.transformer_flux2.apply_rotary_emb", axis=1),),
    refuse=_refuse,
    notes="Reference images are kept unless reference_tokens is 'route'.",
)
