"""Allegro."""

from tread.attach.family import Family, Side, Stack

ALLEGRO = Family(
    models=("AllegroTransformer3DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            sides=(
                Side(name="attention_mask", dim=1),
                Side(name="attention_mask", dim=2),
                # (tables, the index of each token in them)
                Side(name="image_rotary_emb", dim=1, member=1),
            ),
        ),
    ),
)
