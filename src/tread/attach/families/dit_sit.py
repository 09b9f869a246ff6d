"""DiT and SiT in the layout of their authors' own code, LightningDiT, and all of them with REPA's projectors."""

from dataclasses import replace

from tread.attach.family import Family, Side, Stack, patches, setting

DIT_SIT = Family(
    models=("DiT", "SiT", "LightningDiT"),
    parts=("x_embedder", "t_embedder", "final_layer", "patch_size"),
    # a rope is a module that layers call on (B, heads, S, D), with a table of its own
    stacks=(Stack(name="blocks", stream="x", sides=(Side(name="feat_rope", dim=2, full=True, optional=True),)),),
    inputs=("x",),
    tokens=patches("x", 2, 3, size=setting("patch_size")),
)

# projectors read the full stream after layer `encoder_depth`, which may be inside a window
DIT_SIT_REPA = replace(
    DIT_SIT,
    parts=(*DIT_SIT.parts, "encoder_depth"),
    per_block=True,
    notes="With REPA's encoder_depth the projectors see every token, dropped ones as they entered the window: align by "
    "handle.kept, or start the first route at encoder_depth.",
)
