"""CogView4, with the attention it samples with and the one it trains with."""

from torch import nn

from tread.attach.family import SHARED_ROTARY, Arguments, Family, Side, Stack


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    if (arguments.get("attention_kwargs") or {}).get("batch_flag") is not None:
        return "batch_flag packs samples of different lengths into one sequence; all samples keep one number of tokens."
    return None


COGVIEW4 = Family(
    models=("CogView4Transformer2DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            returns=0,
            sides=(Side(name="image_rotary_emb", dim=0), Side(name="attention_kwargs.latent_attn_mask", dim=1)),
        ),
    ),
    rotary=(SHARED_ROTARY,),
    refuse=_refuse,
    notes="Packed samples (batch_flag) cannot be routed.",
)
