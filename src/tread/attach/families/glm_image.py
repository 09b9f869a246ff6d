"""GLM-Image."""

from torch import nn

from tread.attach.family import SHARED_ROTARY, Arguments, Family, Side, Stack, patches, setting


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    caches = arguments.get("kv_caches")
    if caches is None or caches[0].mode != "write":
        return None
    return "its key-value cache would be written without the dropped tokens; write it inside handle.dense()."


GLM_IMAGE = Family(
    models=("GlmImageTransformer2DModel",),
    # the table covers the image tokens alone
    stacks=(Stack(name="transformer_blocks", returns=0, sides=(Side(name="image_rotary_emb", dim=0),)),),
    tokens=patches("hidden_states", 2, 3, size=setting("config.patch_size")),
    rotary=(SHARED_ROTARY,),
    refuse=_refuse,
    notes="Condition images come through a key-value cache: write it inside handle.dense().",
)
