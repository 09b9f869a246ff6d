"""LongCat AudioDiT: speech."""

from tread.attach.family import Family, Rotary, Side, Stack

LONGCAT_AUDIO = Family(
    models=("LongCatAudioDiTTransformer",),
    stacks=(Stack(name="blocks", sides=(Side(name="mask", dim=1), Side(name="rope", dim=0))),),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_longcat_audio_dit._apply_rotary_emb", axis=1),),
)
