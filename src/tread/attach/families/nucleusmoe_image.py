"""NucleusMoE-Image."""

from tread.attach.family import Family, Rotary, Side, Stack, length

NUCLEUSMOE_IMAGE = Family(
    models=("NucleusMoEImageTransformer2DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            sides=(
                Side(name="image_rotary_emb", dim=0, member=0),  # the second table is the text's
                Side(name="attention_kwargs.attention_mask", dim=1, image="first"),
            ),
        ),
    ),
    tokens=length("hidden_states"),
    rotary=(
        Rotary(function="diffusers.models.transformers.transformer_nucleusmoe_image._apply_rotary_emb_nucleus", axis=1),
    ),
    notes="Its experts choose tokens: inside a route they choose among the kept ones, fewer in proportion.",
)
