"""HunyuanVideo: text to video and image to video (latents concatenated, or the first frame replaced)."""

from typing import Any

from tread.attach.family import SHARED_ROTARY, Arguments, Family, Side, Stack, patches, setting

# keys are image tokens first, then text; the table covers image tokens only
MASK = Side(name="attention_mask", dim=3)
STACKS = (
    Stack(name="transformer_blocks", returns=0, image="first", sides=(MASK, Side(name="freqs_cis", dim=0))),
    Stack(
        name="single_transformer_blocks", returns=0, image="first", sides=(MASK, Side(name="image_rotary_emb", dim=0))
    ),
)

_frame = patches("hidden_states", -2, -1, size=setting("config.patch_size"))


def _first_frame(model: Any, arguments: Arguments) -> int:
    """The number of tokens of the first frame, which layers with token_replace address by index; 0 without."""
    return _frame(model, arguments) if model.config.image_condition_type == "token_replace" else 0


HUNYUAN_VIDEO = Family(
    models=("HunyuanVideoTransformer3DModel",),
    stacks=STACKS,
    pinned=_first_frame,
    rotary=(SHARED_ROTARY,),
    notes="With token_replace the tokens of the first frame are always kept.",
)
