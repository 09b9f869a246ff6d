"""The refiner of SANA-WM: the video half of LTX-2 over one block of frames."""

from torch import nn

from tread.attach.family import Arguments, Family, Side, Stack


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    mode = arguments.get("kv_cache_mode")
    if mode is None or "capture" not in mode:
        return None
    return (
        f"kv_cache_mode {mode!r} stores the keys and values of every token in every layer, and dropped ones have none."
    )


SANA_WM_REFINER = Family(
    models=("SanaWMLTX2RefinerTransformer3DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            sides=(
                # (B, S, D) where rotations are interleaved, (B, heads, S, D) where they are split
                Side(name="video_rotary_emb", dim=1, ndim=3),
                Side(name="video_rotary_emb", dim=2, ndim=4),
                Side(name="temb", dim=1),
            ),
        ),
    ),
    refuse=_refuse,
    notes="Forwards that fill the key and value cache must run dense.",
)
