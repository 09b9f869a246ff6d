"""MiniMax Music 3: the flow-matching transformer."""

from tread.attach.family import Family, Rotary, Side, Stack, length

MINIMAX_MUSIC3 = Family(
    models=("MiniMaxMusic3Transformer1DModel",),
    # the timestep's token comes before the audio tokens, also in the table
    stacks=(Stack(name="transformer_blocks", sides=(Side(name="rotary_emb", dim=0),)),),
    tokens=length("hidden_states", 2),
    rotary=(
        Rotary(function="diffusers.models.transformers.transformer_minimax_music3._apply_partial_rotary_emb", axis=1),
    ),
)
