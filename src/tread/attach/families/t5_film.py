"""The decoder of Spectrogram Diffusion."""

from tread.attach.family import Family, Side, Stack

T5_FILM = Family(
    models=("T5FilmDecoder",),
    # the mask of the cross-attention is (B, 1, S, T)
    stacks=(Stack(name="decoders", returns=0, sides=(Side(name="encoder_attention_mask", dim=2),)),),
)
