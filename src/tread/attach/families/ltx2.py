"""LTX-2: video and audio. Video tokens are routed; audio tokens are few and always kept."""

from tread.attach.family import Family, Side, Stack, square

LTX2 = Family(
    models=("LTX2VideoTransformer3DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            returns=0,
            sides=(
                # (B, S, D) where rotations are interleaved, (B, heads, S, D) where they are split
                *(Side(name="video_rotary_emb", dim=1, ndim=3), Side(name="video_rotary_emb", dim=2, ndim=4)),
                *(Side(name="ca_video_rotary_emb", dim=1, ndim=3), Side(name="ca_video_rotary_emb", dim=2, ndim=4)),
                # one timestep per sample, or one per token where frames are given as conditions
                *(Side(name=name, dim=1) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate")),
                *square("self_attention_mask", 1, 2),
            ),
        ),
    ),
    notes="Video tokens are routed, audio tokens never. Give tokens of conditioning frames as force_keep.",
)
